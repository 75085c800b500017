_base_ = '../../_base_/classification/imagenet_deit_8xb128-300e.py'

model = dict(
    type='mmgate.Gated',
    host='mmpretrain.ImageClassifier',
    backbone=dict(type='TIMMBackbone', model_name='pvt_v2_b1', drop_path_rate=0.1),
    head=dict(in_channels=512),
    attention=dict(path='backbone.**', type='PLuGMultiheadAttention'))
