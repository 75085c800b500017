# Fine-tuning at 384 x 384, as Agent-Swin-B's authors and Swin's: from the checkpoint of 224 x 224 in `load_from`, whose
# positions are resized; 1e-5 for 256 images a step, cosine over 30 epochs after 5 of warm-up; whole images in evaluation.
_base_ = 'imagenet_8xb128-300e.py'

train_pipeline = _base_.train_dataloader.dataset.pipeline
train_pipeline[1].scale = 384
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(384, 384), backend='pillow', interpolation='bicubic'),
    dict(type='PackInputs')
]
train_dataloader = dict(batch_size=32, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(batch_size=32, dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
optim_wrapper = dict(optimizer=dict(lr=1e-5, weight_decay=1e-8))
param_scheduler = _base_.param_scheduler
param_scheduler[0].end = param_scheduler[1].begin = 5
param_scheduler[1].eta_min = 1e-7
train_cfg = dict(max_epochs=30)
auto_scale_lr = dict(base_batch_size=256)
