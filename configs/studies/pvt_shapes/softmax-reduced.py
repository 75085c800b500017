# PVT's own attention, to keys reduced 8-4-2-1, in the shell of the others
_base_ = '../../vanilla/mask_rcnn/mask-rcnn_pvt-demo_1xb8-8e_shapes.py'
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)
model = dict(backbone=dict(type='mmgate.PVT'))
optim_wrapper = dict(constructor='mmgate.GateOptimWrapperConstructor')
