_base_ = '../../_base_/classification/imagenet_cswin_8xb128-300e.py'

model = dict(
    backbone=dict(
        type='mmgate.AgentCSwin', arch='tiny', out_indices=(3,), drop_path_rate=0.2),
    head=dict(in_channels=512))
# The authors evaluate averaged weights.
custom_hooks = [dict(type='EMAHook', momentum=1.6e-4, priority='ABOVE_NORMAL')]
# The authors' ImageNet code decays the agent biases.
optim_wrapper = dict(constructor='mmgate.GroupedOptimWrapperConstructor')
