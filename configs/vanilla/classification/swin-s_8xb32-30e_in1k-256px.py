# Agent attention, Fig. 7: fine-tuned for 30 epochs at 256 pixels, from 224, by the recipe of 384.
_base_ = 'swin-s_8xb32-30e_in1k-384px.py'

model = dict(backbone=dict(pretrain_img_size=256, window_size=8))
train_pipeline = _base_.train_dataloader.dataset.pipeline
train_pipeline[1].scale = 256
test_pipeline = _base_.val_dataloader.dataset.pipeline
test_pipeline[1].scale = (256, 256)
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
