_base_ = 'dgvit_1xb128-100e_cifar10.py'

model = dict(
    data_preprocessor=dict(
        mean=[129.304, 124.070, 112.434],
        std=[68.170, 65.392, 70.418]),
    head=dict(num_classes=100))
train_dataloader = dict(dataset=dict(type='CIFAR100', data_root='data/cifar100'))
val_dataloader = dict(dataset=dict(type='CIFAR100', data_root='data/cifar100'))
test_dataloader = val_dataloader
