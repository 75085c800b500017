_base_ = '../../dgvit_1xb64-40e_digits.py'
# DGViT in all but its attention
model = dict(backbone=dict(attention=None))
