# scikit-learn's handwritten digits. Data: python tools/dataset_converters/digits.py data/digits
# No flips: a digit would become another.
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='RandomCrop', crop_size=32, padding=2),
    dict(type='PackInputs')
]
test_pipeline = [dict(type='LoadImageFromFile'), dict(type='PackInputs')]
dataset_type = 'CustomDataset'
data_root = 'data/digits'
train_dataloader = dict(
    batch_size=64,
    num_workers=1,
    persistent_workers=True,
    dataset=dict(type=dataset_type, data_root=data_root, data_prefix='train', pipeline=train_pipeline),
    sampler=dict(type='DefaultSampler', shuffle=True))
val_dataloader = dict(
    batch_size=128,
    num_workers=1,
    persistent_workers=True,
    dataset=dict(type=dataset_type, data_root=data_root, data_prefix='val', pipeline=test_pipeline),
    sampler=dict(type='DefaultSampler', shuffle=False))
val_evaluator = dict(type='Accuracy', topk=(1, ))
test_dataloader = val_dataloader
test_evaluator = val_evaluator
