# Trains the model of mask2former_lite0_1xb4-1k_camvid-160x128.py for 150 more steps.
_base_ = 'mask2former_lite0_1xb4-1k_camvid-160x128.py'

load_from = 'work_dirs/gate_rate_camvid_start/vanilla/seed0/iter_1000.pth'
optim_wrapper = dict(optimizer=dict(lr=2e-4))
train_cfg = dict(max_iters=150, val_interval=150)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=20),
    dict(type='MultiStepLR', by_epoch=False, begin=0, end=150, milestones=[110], gamma=0.1)
]
default_hooks = dict(checkpoint=dict(interval=150))
