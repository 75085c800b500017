_base_ = '../../_base_/classification/deit-t_8xb128-300e.py'

model = dict(
    type='mmgate.Gated',
    host='mmpretrain.ImageClassifier',
    attention=dict(
        path='backbone.layers.*.attn',
        type='PolaFormerAttention',
        map_size=(14, 14),
        class_token=True))
