# Agent-PVT's and SAGA-PVT's partner: PVT's attention over a reduced map in their shell, without a class token.
_base_ = '../../_base_/classification/imagenet_pvt_8xb128-300e.py'

model = dict(
    backbone=dict(
        type='mmgate.PVT', arch='tiny', out_indices=(3,), drop_path_rate=0.1))
