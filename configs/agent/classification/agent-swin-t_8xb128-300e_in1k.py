_base_ = '../../_base_/classification/imagenet_swin_8xb128-300e.py'
model = dict(backbone=dict(type='mmgate.AgentSwin'))
# The authors' ImageNet code decays the agent biases.
optim_wrapper = dict(constructor='mmgate.GroupedOptimWrapperConstructor')
