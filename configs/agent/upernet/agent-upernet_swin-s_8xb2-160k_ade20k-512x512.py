_base_ = 'agent-upernet_swin-t_8xb2-160k_ade20k-512x512.py'

model = dict(
    backbone=dict(
        arch='small',
        init_cfg=dict(checkpoint='checkpoints/agent_swin_s.pth')))
