_base_ = '../../_base_/classification/imagenet_8xb128-300e.py'

model = dict(
    backbone=dict(
        type='mmgate.AgentSwin', arch='tiny', out_indices=(3,),
        drop_path_rate=0.2, pad_small_map=False),
    head=dict(in_channels=768))
# Swin's own clipping; the authors' ImageNet code decays the agent biases.
optim_wrapper = dict(
    constructor='DefaultOptimWrapperConstructor',
    clip_grad=dict(max_norm=5.0))
