_base_ = [
    '../../../../configs/_base_/import_mmgate.py',
    'mmseg::swin/swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512.py'
]
custom_imports = dict(imports=['mmgate', 'projects.linear_attention'], allow_failed_imports=False)

# From Swin's own ImageNet weights, which fill what is shared; the papers trained their own.
model = dict(backbone=dict(type='mmgate.LinearSwin', attention=dict(type='FocusedLinearAttention')))
optim_wrapper = dict(constructor='mmgate.GateOptimWrapperConstructor')
auto_scale_lr = dict(enable=False, base_batch_size=16)
