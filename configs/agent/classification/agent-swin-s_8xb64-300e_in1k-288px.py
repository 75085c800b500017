# Table 4: from scratch on larger images, 5e-4 for 512 of them a step.
_base_ = '../../vanilla/classification/swin-s_8xb64-300e_in1k-288px.py'

model = dict(backbone=dict(type='mmgate.AgentSwin'))
# The authors' ImageNet code decays the agent biases.
optim_wrapper = dict(constructor='mmgate.GroupedOptimWrapperConstructor')
