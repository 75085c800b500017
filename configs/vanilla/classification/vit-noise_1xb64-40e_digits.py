_base_ = 'vit_1xb64-40e_digits.py'
train_dataloader = dict(dataset=dict(pipeline=_base_.noisy_pipeline))
