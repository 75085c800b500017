_base_ = 'dgvit_1xb128-100e_cifar10.py'
# Images cropped and flipped at random, which the paper does not mention
train_pipeline = [
    dict(type='RandomCrop', crop_size=32, padding=4),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='PackInputs')
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
