_base_ = '../../../../configs/_base_/classification/imagenet_swin_8xb128-300e.py'
custom_imports = dict(imports=['mmgate', 'projects.linear_attention'], allow_failed_imports=False)
model = dict(backbone=dict(type='mmgate.LinearSwin', attention=dict(type='EfficientAttention')))
