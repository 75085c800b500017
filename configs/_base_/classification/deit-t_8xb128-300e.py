# DeiT-T without a distillation token, by Agent attention's recipe; the prediction is made from the class token.
_base_ = 'imagenet_8xb128-300e.py'

model = dict(
    backbone=dict(type='VisionTransformer', arch='deit-tiny', img_size=224, patch_size=16),
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
# The default of the authors' configs.
optim_wrapper = dict(
    clip_grad=dict(max_norm=5.0),
    paramwise_cfg=dict(
        custom_keys={
            '.cls_token': dict(decay_mult=0.0),
            '.pos_embed': dict(decay_mult=0.0)
        }))
