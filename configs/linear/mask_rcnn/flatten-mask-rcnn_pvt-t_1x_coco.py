_base_ = '../../vanilla/mask_rcnn/mask-rcnn_pvt-t_1x_coco.py'
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

# From PVT's own ImageNet weights, which fill what is shared; the papers trained their own.
model = dict(backbone=dict(type='mmgate.LinearPVT', attention=dict(type='FocusedLinearAttention')))
optim_wrapper = dict(constructor='mmgate.GateOptimWrapperConstructor')
