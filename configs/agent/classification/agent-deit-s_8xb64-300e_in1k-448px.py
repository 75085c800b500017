_base_ = 'agent-deit-s_8xb128-300e_in1k.py'
# Table 4: from scratch on larger images, 5e-4 for 512 of them a step.
model = dict(backbone=dict(img_size=448))
train_pipeline = _base_.train_dataloader.dataset.pipeline
train_pipeline[1].scale = 448
test_pipeline = _base_.val_dataloader.dataset.pipeline
test_pipeline[1].scale, test_pipeline[2].crop_size = (512, 512), 448
train_dataloader = dict(batch_size=64, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
optim_wrapper = dict(optimizer=dict(lr=5e-4))
param_scheduler = _base_.param_scheduler
param_scheduler[1].eta_min = 5e-6
auto_scale_lr = dict(base_batch_size=512)
