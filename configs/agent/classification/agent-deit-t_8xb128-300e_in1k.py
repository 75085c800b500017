_base_ = '../../_base_/classification/deit-t_8xb128-300e.py'

model = dict(
    type='mmgate.Gated',
    host='mmpretrain.ImageClassifier',
    attention=dict(
        path='backbone.layers.*.attn',
        type='AgentAttention',
        map_size=(14, 14),
        agent_num=49,
        class_token=True))
# The authors' ImageNet code decays the agent biases.
optim_wrapper = dict(constructor='DefaultOptimWrapperConstructor')
