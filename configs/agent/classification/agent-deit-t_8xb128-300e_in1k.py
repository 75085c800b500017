_base_ = '../../_base_/classification/gated-deit-t_8xb128-300e.py'
model = dict(attention=dict(type='AgentAttention', agent_num=49))
# The authors' ImageNet code decays the agent biases.
optim_wrapper = dict(constructor='mmgate.GroupedOptimWrapperConstructor')
