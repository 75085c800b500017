# A control without gates: the projection of the attention's logits learns five times as fast.
_base_ = '../../real/facemask/deformable-detr-refine_lite0_1xb4-12e_facemask.py'
optim_wrapper = dict(paramwise_cfg=dict(custom_keys=dict(attention_weights=dict(lr_mult=5.0))))
