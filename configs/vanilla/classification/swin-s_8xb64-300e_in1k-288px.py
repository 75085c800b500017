_base_ = 'swin-s_8xb128-300e_in1k.py'
# Agent attention, Table 4: from scratch on larger images, 5e-4 for 512 of them a step.
model = dict(backbone=dict(pretrain_img_size=288, window_size=9))
train_pipeline = _base_.train_dataloader.dataset.pipeline
train_pipeline[1].scale = 288
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(288, 288), backend='pillow', interpolation='bicubic'),
    dict(type='PackInputs')
]
train_dataloader = dict(batch_size=64, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
optim_wrapper = dict(optimizer=dict(lr=5e-4))
param_scheduler = _base_.param_scheduler
param_scheduler[1].eta_min = 5e-6
auto_scale_lr = dict(base_batch_size=512)
