_base_ = '../../_base_/classification/imagenet_pvt_8xb128-300e.py'

model = dict(
    backbone=dict(
        type='mmgate.AgentPVT', arch='medium', out_indices=(3,), drop_path_rate=0.3))
# The authors' ImageNet code decays the agent biases.
optim_wrapper = dict(
    constructor='mmgate.GroupedOptimWrapperConstructor',
    clip_grad=dict(max_norm=1.0))
