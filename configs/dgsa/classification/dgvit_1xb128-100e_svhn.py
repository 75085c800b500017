_base_ = [
    '_base_/svhn.py',
    'mmpretrain::_base_/default_runtime.py',
    '_base_/dgvit_1xb128-100e.py'
]
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

model = dict(
    data_preprocessor=dict(
        mean=[111.61, 113.16, 120.57],
        std=[50.50, 51.26, 50.24]))
