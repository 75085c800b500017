_base_ = '../../real/facemask/plug-deformable-detr-refine_lite0_1xb4-12e_facemask.py'
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'mmgate.gates': dict(lr_mult=20.0)}))
