_base_ = '../../_base_/classification/imagenet_8xb128-300e.py'

model = dict(
    backbone=dict(
        type='mmgate.AgentCSwin', arch='base', out_indices=(3,), drop_path_rate=0.5),
    head=dict(in_channels=768))
# CSwin-B's own.
optim_wrapper = dict(optimizer=dict(weight_decay=0.1))
# The authors evaluate averaged weights.
custom_hooks = [dict(type='EMAHook', momentum=8e-5, priority='ABOVE_NORMAL')]
