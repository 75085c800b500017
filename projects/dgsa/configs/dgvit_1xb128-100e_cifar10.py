_base_ = [
    'mmpretrain::_base_/datasets/cifar10_bs16.py',
    'mmpretrain::_base_/default_runtime.py',
    '_base_/dgvit_1xb128-100e.py'
]

model = dict(
    data_preprocessor=dict(
        mean=[125.307, 122.961, 113.8575],
        std=[51.5865, 50.847, 51.255]))
# Images as they are: the paper names no augmentation.
train_dataloader = dict(batch_size=128, dataset=dict(pipeline=[dict(type='PackInputs')]))
val_dataloader = dict(batch_size=128)
test_dataloader = dict(batch_size=128)
