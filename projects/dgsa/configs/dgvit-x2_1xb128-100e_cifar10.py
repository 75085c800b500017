_base_ = 'dgvit_1xb128-100e_cifar10.py'
# Table 1: expansion by 2
model = dict(backbone=dict(expansion=2))
