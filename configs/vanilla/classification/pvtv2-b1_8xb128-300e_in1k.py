# SAGA-PVTv2's partner: PVTv2's attention over a reduced map in its shell.
_base_ = '../../_base_/classification/imagenet_8xb128-300e.py'

model = dict(
    backbone=dict(
        type='mmgate.PVTv2', arch='b1', out_indices=(3,), drop_path_rate=0.1),
    head=dict(in_channels=512))
