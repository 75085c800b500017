_base_ = '../../_base_/mask2former_r18_1xb8-1k_shapes-128x128.py'
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)
# batch norms keep the statistics of the trained model, as those of frozen parts do
model = dict(backbone=dict(norm_eval=True))
optim_wrapper = dict(constructor='mmgate.GateOptimWrapperConstructor')
