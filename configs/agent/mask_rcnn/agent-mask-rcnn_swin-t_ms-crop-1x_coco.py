_base_ = '../../vanilla/mask_rcnn/mask-rcnn_swin-t_ms-crop-1x_coco.py'
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

# The published weights, converted by tools/model_converters/agent_attention.py.
model = dict(
    backbone=dict(
        _delete_=True,
        type='mmgate.AgentSwin',
        arch='tiny',
        agent_nums=(81, 144, 196, 49),
        drop_path_rate=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='checkpoints/agent_swin_t.pth')))
optim_wrapper = dict(
    paramwise_cfg=dict(
        custom_keys=dict(
            an_bias=dict(decay_mult=0.),
            na_bias=dict(decay_mult=0.),
            ah_bias=dict(decay_mult=0.),
            aw_bias=dict(decay_mult=0.),
            ha_bias=dict(decay_mult=0.),
            wa_bias=dict(decay_mult=0.))))
