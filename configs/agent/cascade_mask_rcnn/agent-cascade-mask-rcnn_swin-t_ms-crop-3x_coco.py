_base_ = '../../vanilla/cascade_mask_rcnn/cascade-mask-rcnn_swin-t_ms-crop-3x_coco.py'
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

# From the authors' ImageNet weights as they are published.
model = dict(
    backbone=dict(
        type='mmgate.AgentSwin',
        arch='tiny',
        agent_nums=(81, 144, 196, 49),
        init_cfg=dict(checkpoint='https://cloud.tsinghua.edu.cn/f/a2ddc1190c224f768a41/?dl=1')))
optim_wrapper = dict(constructor='mmgate.GateOptimWrapperConstructor')
