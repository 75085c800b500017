_base_ = 'dgvit_1xb128-100e_cifar10.py'
# A.5: a gate of two layers
model = dict(backbone=dict(attention=dict(type='DifferentialGatedMultiheadAttention', gate_depth=2)))
