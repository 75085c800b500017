_base_ = '../../_base_/classification/imagenet_deit_8xb128-300e.py'

# mmdet's PVT, of whose last stage all tokens are averaged: the paper's has a class token there and 0.4 M more.
model = dict(
    type='mmgate.Gated',
    host='mmpretrain.ImageClassifier',
    backbone=dict(type='mmgate.LinearPVT', arch='tiny', out_indices=(3,), drop_path_rate=0.1),
    attention=dict(path='backbone.**', type='PLuGMultiheadAttention'))
