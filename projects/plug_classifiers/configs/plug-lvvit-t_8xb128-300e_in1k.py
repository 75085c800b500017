_base_ = 'vanilla/lvvit-t_8xb128-300e_in1k.py'

model = dict(
    type='mmgate.Gated',
    host='mmpretrain.ImageClassifier',
    attention=dict(path='backbone.layers.*.attn', type='PLuGMultiheadAttention'))
