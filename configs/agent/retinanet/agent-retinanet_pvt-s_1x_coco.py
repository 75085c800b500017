_base_ = 'agent-retinanet_pvt-t_1x_coco.py'

model = dict(
    backbone=dict(
        arch='small',
        drop_path_rate=0.1,
        init_cfg=dict(checkpoint='checkpoints/agent_pvt_s.pth')))
