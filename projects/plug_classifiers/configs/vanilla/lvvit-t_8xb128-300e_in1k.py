# By LV-ViT's public code: DeiT's augmentation of single images, MixToken instead of Mixup and CutMix, 1.6e-3 for 1024
# images a step, 5 epochs of warm-up, weights averaged with 0.99992 a step, tests on the short edge resized to 224 / 0.9
# and the centre. Its 10 epochs at the least rate are left out: `--cfg-options train_cfg.max_epochs=310` adds them. It
# names no command for T; the drop path is S's. It draws bilinear or bicubic crops, these are bicubic.
#
# The authors train on labels of tokens that another network made of every image (NFNet-F6). A transform that writes them
# into `gt_token_score`, (14 x 14, 1000) for the crop as it is, is all that this file needs for them; without one the
# image's label is that of each token.
_base_ = '../../../../configs/_base_/classification/imagenet_8xb128-300e.py'
custom_imports = dict(imports=['mmgate', 'projects.plug_classifiers'], allow_failed_imports=False)

model = dict(
    data_preprocessor=dict(batch_augments=None),
    backbone=dict(type='mmgate.LVViT', arch='tiny', mix_token=True, drop_path_rate=0.1),
    neck=None,
    head=dict(
        _delete_=True,
        type='mmgate.TokenLabelHead',
        num_classes=1000,
        in_channels=240,
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.02),
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original')))

train_pipeline = _base_.train_dataloader.dataset.pipeline
train_pipeline[-1].algorithm_keys = ('gt_token_score',)
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='ResizeEdge', scale=248, edge='short', backend='pillow', interpolation='bicubic'),
    dict(type='CenterCrop', crop_size=224),
    dict(type='PackInputs')
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
optim_wrapper = dict(
    optimizer=dict(lr=1.6e-3),
    paramwise_cfg=dict(
        custom_keys={
            '.cls_token': dict(decay_mult=0.0),
            '.pos_embed': dict(decay_mult=0.0)
        }))
param_scheduler = _base_.param_scheduler
param_scheduler[0].end = param_scheduler[1].begin = 5
param_scheduler[0].start_factor = 1e-6 / 1.6e-3
custom_hooks = [dict(type='EMAHook', momentum=8e-5, priority='ABOVE_NORMAL')]
