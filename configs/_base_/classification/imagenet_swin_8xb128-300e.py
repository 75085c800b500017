_base_ = 'imagenet_8xb128-300e.py'

model = dict(
    backbone=dict(arch='tiny', out_indices=(3,), pad_small_map=False, drop_path_rate=0.2),
    head=dict(in_channels=768))
# Swin's own clipping.
optim_wrapper = dict(clip_grad=dict(max_norm=5.0))
