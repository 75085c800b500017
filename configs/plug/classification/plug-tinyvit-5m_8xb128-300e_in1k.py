_base_ = '../../vanilla/classification/tinyvit-5m_8xb128-300e_in1k.py'

model = dict(
    type='mmgate.Gated',
    host='mmpretrain.ImageClassifier',
    attention=dict(path='backbone.stages.*.blocks.*.attn', type='PLuGMultiheadAttention'))
