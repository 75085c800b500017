_base_ = '../../_base_/classification/imagenet_cswin_8xb128-300e.py'

model = dict(
    backbone=dict(
        type='mmgate.AgentCSwin', arch='base', out_indices=(3,), drop_path_rate=0.5),
    head=dict(in_channels=768))
# CSwin-B's own decay; the authors' ImageNet code decays the agent biases, too.
optim_wrapper = dict(
    constructor='mmgate.GroupedOptimWrapperConstructor',
    optimizer=dict(weight_decay=0.1))
# The authors evaluate averaged weights, with 0.99992 a step of 512 images.
custom_hooks = [dict(type='EMAHook', momentum=1.6e-4, priority='ABOVE_NORMAL')]
