_base_ = 'softmax-reduced.py'
custom_imports = dict(imports=['mmgate', 'projects.linear_attention'], allow_failed_imports=False)
model = dict(backbone=dict(attention=dict(type='FocusedLinearAttention')))
