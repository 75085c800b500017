# A small DGViT on real images that need no download: scikit-learn's digits. The sizes and the schedule are ours.
_base_ = [
    '_base_/digits.py', 'mmpretrain::_base_/default_runtime.py',
    '_base_/dgvit_1xb128-100e.py'
]
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

model = dict(
    data_preprocessor=dict(
        mean=[79.7, 79.7, 79.7],
        std=[90.8, 90.8, 90.8]),
    backbone=dict(embed_dims=64, num_layers=4, num_heads=4, patch_size=8),
    head=dict(in_channels=64))
optim_wrapper = dict(optimizer=dict(lr=1e-3))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.05, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', by_epoch=True, begin=0, end=40, T_max=40, convert_to_iter_based=True)
]
train_cfg = dict(max_epochs=40, val_interval=10)
default_hooks = dict(logger=dict(interval=10), checkpoint=dict(interval=10, max_keep_ckpts=1))
auto_scale_lr = dict(base_batch_size=64)
