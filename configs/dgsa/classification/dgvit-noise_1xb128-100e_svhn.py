_base_ = 'dgvit_1xb128-100e_svhn.py'

# Section 5.1: noise on the training images; kinds and levels are ours, the paper names none.
train_pipeline = _base_.train_dataloader.dataset.pipeline
train_pipeline.insert(
    -1,
    dict(
        type='mmgate.RandomNoise',
        kinds=('gaussian', 'salt_and_pepper', 'speckle'),
        levels=(0.05, 0.1, 0.2)))
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
