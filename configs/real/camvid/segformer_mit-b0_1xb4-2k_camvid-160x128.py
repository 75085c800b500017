# SegFormer's attention is in its backbone, so that it begins without Lite0's weights, from scratch. Data: ../README.md
_base_ = 'mask2former_lite0_1xb4-1k_camvid-160x128.py'

model = dict(
    _delete_=True,
    type='mmseg.EncoderDecoder',
    data_preprocessor=dict(
        type='mmseg.SegDataPreProcessor',
        mean=[127.5] * 3,
        std=[127.5] * 3,
        bgr_to_rgb=True,
        pad_val=0,
        seg_pad_val=255,
        size=(128, 160)),
    backbone=dict(
        type='mmseg.MixVisionTransformer',
        in_channels=3,
        embed_dims=32,
        num_stages=4,
        num_layers=[2, 2, 2, 2],
        num_heads=[1, 2, 5, 8],
        patch_sizes=[7, 3, 3, 3],
        sr_ratios=[8, 4, 2, 1],
        out_indices=(0, 1, 2, 3),
        mlp_ratio=4,
        qkv_bias=True,
        drop_path_rate=0.1),
    decode_head=dict(
        type='mmseg.SegformerHead',
        in_channels=[32, 64, 160, 256],
        in_index=[0, 1, 2, 3],
        channels=128,
        dropout_ratio=0.1,
        num_classes=11,
        norm_cfg=dict(type='BN', requires_grad=True),
        align_corners=False,
        loss_decode=dict(type='mmseg.CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0)),
    train_cfg=dict(),
    test_cfg=dict(mode='whole'))

optim_wrapper = dict(
    optimizer=dict(weight_decay=0.01),
    paramwise_cfg=dict(
        _delete_=True,
        custom_keys=dict(norm=dict(decay_mult=0.0), pos_block=dict(decay_mult=0.0))))
train_cfg = dict(max_iters=2000, val_interval=1000)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=50),
    dict(type='PolyLR', eta_min=0, power=1.0, begin=50, end=2000, by_epoch=False)
]
custom_hooks = []  # those of the base are Mask2Former's
