_base_ = [
    '_base_/svhn.py',
    'mmpretrain::_base_/default_runtime.py',
    '_base_/dgvit_1xb128-100e.py'
]
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)
