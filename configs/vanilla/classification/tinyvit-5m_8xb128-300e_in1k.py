_base_ = '../../_base_/classification/imagenet_deit_8xb128-300e.py'

model = dict(
    backbone=dict(
        type='TinyViT',
        arch='5m',
        img_size=(224, 224),
        window_size=[7, 7, 14, 7],
        out_indices=(3,),
        drop_path_rate=0.0,
        gap_before_final_norm=True,
        init_cfg=[
            dict(type='TruncNormal', layer=['Conv2d', 'Linear'], std=0.02, bias=0.0),
            dict(type='Constant', layer=['LayerNorm'], val=1.0, bias=0.0)
        ]),
    neck=None,
    head=dict(in_channels=320))
