# Gates alone, from the vanilla model that vanilla.py trains.
_base_ = 'vanilla.py'
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)
load_from = 'work_dirs/photographs/vanilla/iter_560.pth'
model = dict(
    type='mmgate.Gated',
    host='mmdet.DeformableDETR',
    train='gates',
    attention=dict(
        type='PLuGMultiScaleDeformableAttention',
        path=['encoder.layers.*.self_attn', 'decoder.layers.*.cross_attn']))
optim_wrapper = dict(optimizer=dict(lr=5e-3))
train_cfg = dict(max_iters=200, val_interval=200)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=20),
    dict(type='MultiStepLR', by_epoch=False, begin=0, end=200, milestones=[160], gamma=0.1)
]
custom_hooks = [
    *_base_.custom_hooks,
    dict(type='mmgate.GatesCheckpointHook', by_epoch=False, interval=200)]
