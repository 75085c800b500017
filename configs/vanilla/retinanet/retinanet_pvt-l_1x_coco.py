# As mmdet's but for the drop path of agent attention's recipe, and in float32 as the other sizes.
_base_ = 'mmdet::pvt/retinanet_pvt-l_fpn_1x_coco.py'
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

model = dict(backbone=dict(drop_path_rate=0.3))
optim_wrapper = dict(type='OptimWrapper', constructor='mmgate.GroupedOptimWrapperConstructor')
