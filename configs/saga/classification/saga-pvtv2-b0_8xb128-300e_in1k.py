# Our copy of the paper lacks its settings, and Agent attention, whose recipe this is, has no PVTv2.
_base_ = '../../_base_/classification/imagenet_8xb128-300e.py'

model = dict(
    backbone=dict(
        type='mmgate.SAGAPVTv2', arch='b0', out_indices=(3,), drop_path_rate=0.1),
    head=dict(in_channels=256))
