# Fig. 7: fine-tuned for 30 epochs at 320 pixels, from 224, by the recipe of 384.
_base_ = '../../vanilla/classification/swin-s_8xb32-30e_in1k-320px.py'

model = dict(backbone=dict(type='mmgate.AgentSwin'))
# The authors' ImageNet code decays the agent biases.
optim_wrapper = dict(constructor='mmgate.GroupedOptimWrapperConstructor')
load_from = 'work_dirs/agent-swin-s_8xb128-300e_in1k/epoch_300.pth'
