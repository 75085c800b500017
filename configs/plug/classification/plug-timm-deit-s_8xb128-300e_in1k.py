_base_ = '../../_base_/classification/imagenet_deit_8xb128-300e.py'

# timm's DeiT, which hands its last map to the neck.
model = dict(
    type='mmgate.Gated',
    host='mmpretrain.ImageClassifier',
    backbone=dict(
        type='TIMMBackbone',
        model_name='deit_small_patch16_224',
        features_only=True,
        out_indices=(11,),
        drop_path_rate=0.1),
    head=dict(in_channels=384),
    attention=dict(path='backbone.timm_model.model.blocks.*.attn', type='PLuGMultiheadAttention'))
