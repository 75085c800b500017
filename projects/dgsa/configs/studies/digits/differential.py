_base_ = '../../dgvit_1xb64-40e_digits.py'
# The differential transformer with learnt lambda, otherwise DGViT
model = dict(backbone=dict(attention=dict(type='DifferentialMultiheadAttention')))
