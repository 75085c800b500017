# Table 4: from scratch on larger images, 5e-4 for 512 of them a step.
_base_ = '../../vanilla/classification/pvt-m_8xb64-300e_in1k-256px.py'

model = dict(backbone=dict(type='mmgate.AgentPVT'))
# The authors' ImageNet code decays the agent biases.
optim_wrapper = dict(constructor='mmgate.GroupedOptimWrapperConstructor')
