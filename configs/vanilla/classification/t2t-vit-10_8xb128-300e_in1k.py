# mmpretrain's tokens-to-token module attends by softmax, the paper's by Performer, which mmpretrain has not. All its
# attentions multiply logits by sqrt(d), which the paper's divide by it.
_base_ = '../../_base_/classification/imagenet_deit_8xb128-300e.py'

model = dict(
    backbone=dict(
        type='T2T_ViT',
        img_size=224,
        embed_dims=256,
        t2t_cfg=dict(token_dims=64, use_performer=False),
        num_layers=10,
        layer_cfgs=dict(num_heads=4, feedforward_channels=512),
        drop_path_rate=0.1,
        init_cfg=[
            dict(type='TruncNormal', layer='Linear', std=0.02),
            dict(type='Constant', layer='LayerNorm', val=1.0, bias=0.0)
        ]),
    neck=None,
    head=dict(
        _delete_=True,
        type='VisionTransformerClsHead',
        num_classes=1000,
        in_channels=256,
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.02),
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original')))
