_base_ = [
    '../../../../configs/vanilla/classification/vit_1xb64-40e_digits.py',
    '../_base_/digits_noise.py'
]
custom_imports = dict(imports=['mmgate', 'projects.dgsa'], allow_failed_imports=False)

train_pipeline = _base_.train_dataloader.dataset.pipeline
train_pipeline.insert(-1, _base_.noise)
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
