_base_ = 'deit-s_8xb128-300e_in1k.py'
# Agent attention, Table 4: from scratch on larger images; the recipe there is not named, this is DeiT's, 5e-4 for 512 images.
model = dict(backbone=dict(img_size=416))
train_pipeline = _base_.train_dataloader.dataset.pipeline
train_pipeline[1].scale = 416
test_pipeline = _base_.val_dataloader.dataset.pipeline
test_pipeline[1].scale, test_pipeline[2].crop_size = 475, 416
train_dataloader = dict(batch_size=64, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
optim_wrapper = dict(optimizer=dict(lr=5e-4))
param_scheduler = _base_.param_scheduler
param_scheduler[0].start_factor, param_scheduler[1].eta_min = 2e-3, 1e-5
auto_scale_lr = dict(base_batch_size=512)
