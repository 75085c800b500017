# DeiT-T with every attention replaced by one over the map that lets the class token pass.
_base_ = 'deit-t_8xb128-300e.py'

model = dict(
    type='mmgate.Gated',
    host='mmpretrain.ImageClassifier',
    attention=dict(path='backbone.layers.*.attn'))
