_base_ = '../../_base_/classification/imagenet_swin_8xb128-300e.py'
model = dict(backbone=dict(type='mmgate.LinearSwin', attention=dict(type='EnhancedLinearAttention')))
