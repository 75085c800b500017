# The ImageNet recipe of Agent attention's paper and public code: AdamW, 1e-3 for 1024 images a step, cosine to 1e-5 over
# 300 epochs after 20 of warm-up from 1e-6, weight decay 0.05, RandAugment, random erasing, Mixup, CutMix, label
# smoothing; tests on both edges resized to 256 and the centre. With RandAugment the colour jitter of the authors'
# configs is off, as in timm, whose augmentations theirs are.
_base_ = [
    '../import_mmgate.py',
    'mmpretrain::_base_/datasets/imagenet_bs64_swin_224.py',
    'mmpretrain::_base_/schedules/imagenet_bs1024_adamw_swin.py',
    'mmpretrain::_base_/default_runtime.py'
]
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

# Where a file of another project inherits this one, mmengine would look mmpretrain's types up in our scope.
model = dict(
    _scope_='mmpretrain',
    type='ImageClassifier',
    data_preprocessor=dict(
        type='ClsDataPreprocessor',
        num_classes=1000,
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        to_rgb=True,
        batch_augments=dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)])),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(
        type='LinearClsHead',
        num_classes=1000,
        in_channels=512,
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.02),
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original')))

test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(256, 256), backend='pillow', interpolation='bicubic'),
    dict(type='CenterCrop', crop_size=224),
    dict(type='PackInputs')
]
train_dataloader = dict(batch_size=128)
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
optim_wrapper = dict(constructor='mmgate.GateOptimWrapperConstructor')
# The authors' cosine, timm's, goes by iterations and does not start anew after the warm-up.
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=True, end=20, convert_to_iter_based=True),
    dict(type='mmgate.CosineLR', eta_min=1e-5, by_epoch=True, begin=20, convert_to_iter_based=True)
]
auto_scale_lr = dict(enable=False, base_batch_size=1024)
default_hooks = dict(checkpoint=dict(interval=10, max_keep_ckpts=3))
