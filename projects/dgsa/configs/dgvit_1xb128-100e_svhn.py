_base_ = 'dgvit_1xb128-100e_cifar10.py'

model = dict(
    data_preprocessor=dict(
        mean=[111.61, 113.16, 120.57],
        std=[50.50, 51.26, 50.24]))
# The cropped digits, data/svhn/train_32x32.mat and test_32x32.mat
train_dataloader = dict(dataset=dict(type='mmgate.SVHN', data_root='data/svhn'))
val_dataloader = dict(dataset=dict(type='mmgate.SVHN', data_root='data/svhn'))
test_dataloader = val_dataloader
