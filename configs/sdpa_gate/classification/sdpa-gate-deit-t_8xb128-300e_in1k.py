_base_ = '../../vanilla/classification/deit-t_8xb128-300e_in1k.py'
# The study is of language models; DeiT's class token is its first token.
model = dict(
    type='mmgate.Gated',
    host='mmpretrain.ImageClassifier',
    attention=dict(path='backbone.layers.*.attn', type='SDPAGatedMultiheadAttention'))
