_base_ = '../../vanilla/mask_rcnn/mask-rcnn_swin-s_ms-crop-1x_coco.py'
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

# From the authors' ImageNet weights as they are published.
model = dict(
    backbone=dict(
        type='mmgate.AgentSwin',
        arch='small',
        agent_nums=(81, 144, 196, 49),
        init_cfg=dict(checkpoint='https://cloud.tsinghua.edu.cn/f/f607172c9fea4d6e99bb/?dl=1')))
optim_wrapper = dict(constructor='mmgate.GateOptimWrapperConstructor')
