_base_ = '../../../../configs/_base_/classification/gated-deit-t_8xb128-300e.py'
custom_imports = dict(imports=['mmgate', 'projects.linear_attention'], allow_failed_imports=False)
model = dict(attention=dict(type='PolaFormerAttention'))
