_base_ = 'dgvit_1xb128-100e_cifar10.py'
# A.5: another lambda_init
model = dict(backbone=dict(attention=dict(type='DifferentialGatedMultiheadAttention', lambda_init=0.5)))
