# mmseg's, with the drop path of agent attention's recipe.
_base_ = [
    '../../_base_/import_mmgate.py',
    'mmseg::swin/swin-base-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512.py'
]
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

model = dict(backbone=dict(drop_path_rate=0.5))
optim_wrapper = dict(constructor='mmgate.GroupedOptimWrapperConstructor')
auto_scale_lr = dict(enable=False, base_batch_size=16)
