# mmpretrain's data set; the images are repeated to three channels, with which Table 5's size comes out.
three_channels = [
    dict(type='NumpyToPIL', to_rgb=False),
    dict(type='torchvision/Grayscale', num_output_channels=3),
    dict(type='PILToNumpy', to_bgr=False),
]
pipeline = [*three_channels, dict(type='PackInputs')]
train_dataloader = dict(
    batch_size=128,
    num_workers=2,
    dataset=dict(type='FashionMNIST', data_root='data/fashion_mnist', split='train', pipeline=pipeline),
    sampler=dict(type='DefaultSampler', shuffle=True))
val_dataloader = dict(
    batch_size=128,
    num_workers=2,
    dataset=dict(
        type='FashionMNIST',
        data_root='data/fashion_mnist',
        split='test',
        test_mode=True,  # without it mmpretrain reads the training images, whatever the split
        pipeline=pipeline),
    sampler=dict(type='DefaultSampler', shuffle=False))
val_evaluator = dict(type='Accuracy', topk=(1, ))
test_dataloader = val_dataloader
test_evaluator = val_evaluator
