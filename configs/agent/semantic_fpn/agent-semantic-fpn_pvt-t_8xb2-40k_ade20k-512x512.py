_base_ = '../../vanilla/semantic_fpn/semantic-fpn_pvt-t_8xb2-40k_ade20k-512x512.py'
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

# The published weights, converted by tools/model_converters/agent_attention.py.
model = dict(
    backbone=dict(
        _delete_=True,
        type='mmgate.AgentPVT',
        arch='tiny',
        agent_nums=(144, 256, 784, 784),
        drop_path_rate=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='checkpoints/agent_pvt_t.pth')))
