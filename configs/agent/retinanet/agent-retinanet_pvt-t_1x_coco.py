_base_ = 'mmdet::pvt/retinanet_pvt-t_fpn_1x_coco.py'
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

# From the authors' ImageNet weights as they are published.
model = dict(
    backbone=dict(
        type='mmgate.AgentPVT',
        agent_nums=(144, 256, 784, 784),
        init_cfg=dict(checkpoint='https://cloud.tsinghua.edu.cn/f/13fdf0e0a7c5498c934f/?dl=1')))
optim_wrapper = dict(constructor='mmgate.GroupedOptimWrapperConstructor')
