_base_ = 'agent-semantic-fpn_pvt-t_8xb2-40k_ade20k-512x512.py'

model = dict(
    backbone=dict(
        arch='small',
        drop_path_rate=0.1,
        init_cfg=dict(checkpoint='checkpoints/agent_pvt_s.pth')))
