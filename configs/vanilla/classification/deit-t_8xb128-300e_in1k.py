# DeiT-T by its own recipe: PLuG's partner. The prediction is made from the class token.
_base_ = '../../_base_/classification/imagenet_deit_8xb128-300e.py'

model = dict(
    backbone=dict(type='VisionTransformer', arch='deit-tiny', img_size=224, patch_size=16, drop_path_rate=0.1),
    neck=None,
    head=dict(
        _delete_=True,
        type='VisionTransformerClsHead',
        num_classes=1000,
        in_channels=192,
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.02),
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original')),
    init_cfg=[
        dict(type='TruncNormal', layer='Linear', std=0.02),
        dict(type='Constant', layer='LayerNorm', val=1.0, bias=0.0)
    ])
optim_wrapper = dict(
    paramwise_cfg=dict(
        custom_keys={
            '.cls_token': dict(decay_mult=0.0),
            '.pos_embed': dict(decay_mult=0.0)
        }))
