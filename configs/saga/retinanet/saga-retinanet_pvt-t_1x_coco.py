_base_ = 'mmdet::pvt/retinanet_pvt-t_fpn_1x_coco.py'
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

# From PVT's own ImageNet weights, which fill what is shared; the paper trained its own and published none.
model = dict(backbone=dict(type='mmgate.SAGAPVT'))
optim_wrapper = dict(constructor='mmgate.GateOptimWrapperConstructor')
