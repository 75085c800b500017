# mmdet's PVT, of whose last stage all tokens are averaged; the paper's has a class token there.
_base_ = '../../vanilla/classification/pvt-t_8xb128-300e_in1k.py'

model = dict(
    type='mmgate.Gated',
    host='mmpretrain.ImageClassifier',
    attention=dict(path='backbone.**', type='PLuGMultiheadAttention'))
