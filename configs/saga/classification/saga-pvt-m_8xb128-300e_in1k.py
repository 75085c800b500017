_base_ = '../../_base_/classification/imagenet_8xb128-300e.py'

model = dict(
    backbone=dict(
        type='mmgate.SAGAPVT', arch='medium', out_indices=(3,), drop_path_rate=0.3))
# PVT's own 5 epochs of warm-up.
param_scheduler = [
    dict(
        type='LinearLR',
        start_factor=1e-3,
        by_epoch=True,
        end=5,
        convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=True, begin=5)
]
optim_wrapper = dict(clip_grad=dict(max_norm=1.0))
