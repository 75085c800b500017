_base_ = 'dgvit_1xb128-100e_cifar10.py'
# The differential transformer with learnt lambda, in the same ViT
model = dict(backbone=dict(attention=dict(type='DifferentialMultiheadAttention')))
