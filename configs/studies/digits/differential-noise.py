_base_ = 'differential.py'
train_dataloader = dict(dataset=dict(pipeline=_base_.noisy_pipeline))
