# mmdet's, with the drop path of agent attention's recipe.
_base_ = 'mmdet::pvt/retinanet_pvt-m_fpn_1x_coco.py'
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

model = dict(backbone=dict(drop_path_rate=0.2))
optim_wrapper = dict(constructor='mmgate.GroupedOptimWrapperConstructor')
