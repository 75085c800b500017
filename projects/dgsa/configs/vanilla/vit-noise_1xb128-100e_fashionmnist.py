_base_ = 'vit_1xb128-100e_fashionmnist.py'
train_pipeline = _base_.train_dataloader.dataset.pipeline
train_pipeline.insert(-1, _base_.noise)
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
