_base_ = [
    '../../_base_/import_mmgate.py',
    'mmseg::sem_fpn/fpn_r50_4xb4-160k_ade20k-512x512.py'
]
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

model = dict(
    pretrained=None,
    backbone=dict(
        _delete_=True,
        type='mmdet.PyramidVisionTransformer',
        num_layers=[2, 2, 2, 2],
        init_cfg=dict(
            checkpoint='https://github.com/whai362/PVT/releases/download/v2/pvt_tiny.pth')),
    neck=dict(in_channels=[64, 128, 320, 512]))
train_dataloader = dict(batch_size=2)
optim_wrapper = dict(
    _delete_=True,
    type='OptimWrapper',
    constructor='mmgate.GroupedOptimWrapperConstructor',
    optimizer=dict(type='AdamW', lr=2e-4, weight_decay=1e-4))
param_scheduler = [
    dict(type='PolyLR', eta_min=0.0, power=0.9, begin=0, end=40000, by_epoch=False)
]
train_cfg = dict(max_iters=40000, val_interval=4000)
default_hooks = dict(checkpoint=dict(interval=4000))
auto_scale_lr = dict(enable=False, base_batch_size=16)
