_base_ = 'agent-retinanet_pvt-t_1x_coco.py'

model = dict(
    backbone=dict(
        arch='medium',
        drop_path_rate=0.2,
        init_cfg=dict(checkpoint='checkpoints/agent_pvt_m.pth')))
