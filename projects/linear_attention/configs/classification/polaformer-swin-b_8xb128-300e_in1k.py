_base_ = '../../../../configs/vanilla/classification/swin-b_8xb128-300e_in1k.py'
custom_imports = dict(imports=['mmgate', 'projects.linear_attention'], allow_failed_imports=False)
model = dict(backbone=dict(type='mmgate.LinearSwin', attention=dict(type='PolaFormerAttention')))
