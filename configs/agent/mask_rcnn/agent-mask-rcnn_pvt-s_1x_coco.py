_base_ = 'agent-mask-rcnn_pvt-t_1x_coco.py'

model = dict(
    backbone=dict(
        arch='small',
        drop_path_rate=0.2,
        init_cfg=dict(checkpoint='checkpoints/agent_pvt_s.pth')))
