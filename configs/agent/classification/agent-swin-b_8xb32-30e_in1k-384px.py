_base_ = '../../vanilla/classification/swin-b_8xb32-30e_in1k-384px.py'

model = dict(backbone=dict(type='mmgate.AgentSwin'))
# The authors' ImageNet code decays the agent biases.
optim_wrapper = dict(constructor='mmgate.GroupedOptimWrapperConstructor')
load_from = 'work_dirs/agent-swin-b_8xb128-300e_in1k/epoch_300.pth'
