_base_ = 'agent-cascade-mask-rcnn_swin-t_ms-crop-3x_coco.py'

model = dict(
    backbone=dict(
        arch='small',
        init_cfg=dict(checkpoint='checkpoints/agent_swin_s.pth')))
