_base_ = '../../_base_/classification/imagenet_deit_8xb128-300e.py'

model = dict(
    backbone=dict(
        type='XCiT',
        patch_size=16,
        embed_dims=192,
        depth=12,
        num_heads=4,
        mlp_ratio=4,
        qkv_bias=True,
        layer_scale_init_value=1.0,
        tokens_norm=True,
        out_type='cls_token'),
    neck=None,
    head=dict(in_channels=192))
