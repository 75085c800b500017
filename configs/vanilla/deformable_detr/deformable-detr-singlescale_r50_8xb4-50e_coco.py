_base_ = 'deformable-detr_r50_8xb4-50e_coco.py'
model = dict(
    num_feature_levels=1,
    backbone=dict(out_indices=(3, )),
    neck=dict(in_channels=[2048], num_outs=1),
    encoder=dict(layer_cfg=dict(self_attn_cfg=dict(num_levels=1))),
    decoder=dict(layer_cfg=dict(cross_attn_cfg=dict(num_levels=1))))
