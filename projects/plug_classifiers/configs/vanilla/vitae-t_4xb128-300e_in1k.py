# By ViTAE's public code: 1e-3 for 512 images a step, 10 epochs of warm-up, weight decay 0.03, weights averaged with
# 0.99996 a step, tests on the short edge resized to 224 / 0.9 and the centre. Its 10 epochs at the least rate are left
# out: `--cfg-options train_cfg.max_epochs=310` adds them. It draws bilinear or bicubic crops, these are bicubic.
_base_ = '../../../../configs/_base_/classification/imagenet_8xb128-300e.py'
custom_imports = dict(imports=['mmgate', 'projects.plug_classifiers'], allow_failed_imports=False)

model = dict(
    backbone=dict(type='mmgate.ViTAE', arch='tiny', drop_path_rate=0.1),
    head=dict(in_channels=256))

test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='ResizeEdge', scale=248, edge='short', backend='pillow', interpolation='bicubic'),
    dict(type='CenterCrop', crop_size=224),
    dict(type='PackInputs')
]
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
optim_wrapper = dict(optimizer=dict(weight_decay=0.03))
param_scheduler = _base_.param_scheduler
param_scheduler[0].end = param_scheduler[1].begin = 10
custom_hooks = [dict(type='EMAHook', momentum=4e-5, priority='ABOVE_NORMAL')]
auto_scale_lr = dict(base_batch_size=512)
