_base_ = 'diff-vit_1xb128-100e_cifar10.py'
# A.5: lambda fixed at 0.8
model = dict(backbone=dict(attention=dict(learnable=False, lambda_init=0.8)))
