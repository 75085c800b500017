_base_ = 'agent-cascade-mask-rcnn_swin-t_ms-crop-3x_coco.py'

model = dict(
    backbone=dict(
        arch='base',
        drop_path_rate=0.4,
        init_cfg=dict(checkpoint='checkpoints/agent_swin_b.pth')),
    neck=dict(in_channels=[128, 256, 512, 1024]))
