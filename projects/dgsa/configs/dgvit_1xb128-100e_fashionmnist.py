_base_ = 'dgvit_1xb128-100e_cifar10.py'

model = dict(
    data_preprocessor=dict(
        mean=[72.94, 72.94, 72.94],
        std=[90.02, 90.02, 90.02]),
    backbone=dict(img_size=28))
# mmpretrain's data set; the images are repeated to three channels, with which Table 5's size comes out.
pipeline = [
    dict(type='NumpyToPIL', to_rgb=False),
    dict(type='torchvision/Grayscale', num_output_channels=3),
    dict(type='PILToNumpy', to_bgr=False),
    dict(type='PackInputs')
]
train_dataloader = dict(
    dataset=dict(type='FashionMNIST', data_root='data/fashion_mnist', pipeline=pipeline))
val_dataloader = dict(
    dataset=dict(
        type='FashionMNIST',
        data_root='data/fashion_mnist',
        test_mode=True,  # without it mmpretrain reads the training images, whatever the split
        pipeline=pipeline))
test_dataloader = val_dataloader
