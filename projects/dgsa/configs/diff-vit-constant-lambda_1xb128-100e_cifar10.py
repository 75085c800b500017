_base_ = 'diff-vit_1xb128-100e_cifar10.py'
# Ours: the differential transformer with a constant lambda of 0.8; A.5 varies M-DGSA's
model = dict(backbone=dict(attention=dict(learnable=False, lambda_init=0.8)))
