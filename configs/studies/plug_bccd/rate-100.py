_base_ = '../../real/bccd/plug-deformable-detr-refine_lite0_1xb4-12e_bccd.py'
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'mmgate.gates': dict(lr_mult=100.0)}))
