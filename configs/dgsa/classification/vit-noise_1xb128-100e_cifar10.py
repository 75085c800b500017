_base_ = 'vit_1xb128-100e_cifar10.py'

# Section 5.1: noise on the training images; kinds and levels are ours, the paper names none.
train_pipeline = [
    dict(type='RandomCrop', crop_size=32, padding=4),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(
        type='mmgate.RandomNoise',
        kinds=('gaussian', 'salt_and_pepper', 'speckle', 'uniform', 'shot'),
        levels=(0.05, 0.1, 0.2)),
    dict(type='PackInputs'),
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
