_base_ = '../../_base_/classification/deit-t_8xb128-300e.py'

model = dict(
    type='mmgate.Gated',
    host='mmpretrain.ImageClassifier',
    attention=dict(
        path='backbone.layers.*.attn',
        type='LinearAngularAttention',
        class_token=True))
