_base_ = [
    'mmpretrain::_base_/datasets/cifar100_bs16.py',
    'mmpretrain::_base_/default_runtime.py',
    '_base_/dgvit_1xb128-100e.py'
]

model = dict(
    data_preprocessor=dict(
        num_classes=100,
        mean=[129.304, 124.070, 112.434],
        std=[68.170, 65.392, 70.418]),
    head=dict(num_classes=100))
# Images as they are: the paper names no augmentation.
train_dataloader = dict(batch_size=128, dataset=dict(pipeline=[dict(type='PackInputs')]))
val_dataloader = dict(batch_size=128)
test_dataloader = dict(batch_size=128)
