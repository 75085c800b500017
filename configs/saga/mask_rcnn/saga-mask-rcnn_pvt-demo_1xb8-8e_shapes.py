# Trained by make demo-pretrain, from scratch as it is and from the classifier of saga-pvt-demo_1xb32-12e_shapes.py.
_base_ = '../../vanilla/mask_rcnn/mask-rcnn_pvt-demo_1xb8-8e_shapes.py'
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

model = dict(backbone=dict(type='mmgate.SAGAPVT'))
optim_wrapper = dict(constructor='mmgate.GateOptimWrapperConstructor')
