_base_ = [
    '_base_/svhn.py',
    'mmpretrain::_base_/default_runtime.py',
    '_base_/dgvit_1xb128-100e.py'
]

model = dict(
    data_preprocessor=dict(
        mean=[111.61, 113.16, 120.57],
        std=[50.50, 51.26, 50.24]))
