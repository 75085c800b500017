_base_ = 'vanilla-attention.py'
train_dataloader = dict(dataset=dict(pipeline=_base_.noisy_pipeline))
