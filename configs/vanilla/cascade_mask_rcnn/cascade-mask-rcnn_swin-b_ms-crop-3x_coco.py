_base_ = 'cascade-mask-rcnn_swin-s_ms-crop-3x_coco.py'

model = dict(
    backbone=dict(
        embed_dims=128,
        num_heads=[4, 8, 16, 32],
        drop_path_rate=0.4,
        init_cfg=dict(
            checkpoint='https://github.com/SwinTransformer/storage/releases/download/v1.0.0/swin_base_patch4_window7_224.pth')),
    neck=dict(in_channels=[128, 256, 512, 1024]))
