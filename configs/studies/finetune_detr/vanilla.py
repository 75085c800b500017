_base_ = '../../_base_/deformable-detr-refine_r18_1xb8-12e_shapes.py'
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)
# batch norms keep the statistics of the trained model, as those of frozen parts do
model = dict(backbone=dict(norm_eval=True))
optim_wrapper = dict(constructor='mmgate.GateOptimWrapperConstructor')
