_base_ = [
    '_base_/fashion_mnist.py',
    'mmpretrain::_base_/default_runtime.py',
    '_base_/dgvit_1xb128-100e.py'
]

model = dict(
    data_preprocessor=dict(
        mean=[72.94, 72.94, 72.94],
        std=[90.02, 90.02, 90.02]),
    backbone=dict(img_size=28))
