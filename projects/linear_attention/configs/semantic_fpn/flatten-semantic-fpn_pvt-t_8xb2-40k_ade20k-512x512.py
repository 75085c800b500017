_base_ = '../../../../configs/vanilla/semantic_fpn/semantic-fpn_pvt-t_8xb2-40k_ade20k-512x512.py'
custom_imports = dict(imports=['mmgate', 'projects.linear_attention'], allow_failed_imports=False)

# From PVT's own ImageNet weights, which fill what is shared; the papers trained their own.
model = dict(backbone=dict(type='mmgate.LinearPVT', attention=dict(type='FocusedLinearAttention')))
optim_wrapper = dict(constructor='mmgate.GateOptimWrapperConstructor')
