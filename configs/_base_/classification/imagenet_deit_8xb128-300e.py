# DeiT's own ImageNet recipe, from its public code: as Agent attention's, but 5 epochs of warm-up, every image three times
# a batch in another augmentation, no clipping, weights averaged with 0.99996 a step, tests on the short edge resized to
# 256 and the centre. DeiT's figures are of the weights themselves; mmengine's hook evaluates the averaged ones.
_base_ = 'imagenet_8xb128-300e.py'

test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='ResizeEdge', scale=256, edge='short', backend='pillow', interpolation='bicubic'),
    dict(type='CenterCrop', crop_size=224),
    dict(type='PackInputs')
]
train_dataloader = dict(sampler=dict(type='RepeatAugSampler', num_repeats=3))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
# By epochs, the full rate only in epoch 5. DeiT's code has each epoch's rate one epoch later, here it comes when it is due.
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, end_factor=0.8002, by_epoch=True, end=5),
    dict(type='mmgate.CosineLR', eta_min=1e-5, by_epoch=True, begin=5)
]
custom_hooks = [dict(type='EMAHook', momentum=4e-5, priority='ABOVE_NORMAL')]
