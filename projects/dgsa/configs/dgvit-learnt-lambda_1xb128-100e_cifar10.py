_base_ = 'dgvit_1xb128-100e_cifar10.py'
# A.5: lambda_init learnt, from 0.8 on
model = dict(backbone=dict(attention=dict(type='DifferentialGatedMultiheadAttention', learnable=True)))
