# Agent-Swin's and SAGA-Swin's partner: Swin's windows in their shell.
_base_ = '../../_base_/classification/imagenet_8xb128-300e.py'

model = dict(
    backbone=dict(
        type='mmgate.LinearSwin', arch='tiny', out_indices=(3,),
        drop_path_rate=0.2, pad_small_map=False),
    head=dict(in_channels=768))
# Swin's own clipping.
optim_wrapper = dict(clip_grad=dict(max_norm=5.0))
