_base_ = 'mmdet::pvt/retinanet_pvt-t_fpn_1x_coco.py'
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
