_base_ = 'vit_1xb64-40e_digits.py'

# Section 5.1: noise on the training images; kinds and levels are ours, the paper names none.
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='RandomCrop', crop_size=32, padding=2),
    dict(
        type='mmgate.RandomNoise',
        kinds=('gaussian', 'salt_and_pepper', 'speckle', 'uniform', 'shot'),
        levels=(0.1, 0.2, 0.4)),
    dict(type='PackInputs'),
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
