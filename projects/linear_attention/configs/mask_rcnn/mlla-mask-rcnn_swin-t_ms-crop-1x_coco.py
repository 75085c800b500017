_base_ = '../_base_/mask-rcnn_swin-t_ms-crop-1x_coco.py'
model = dict(backbone=dict(attention=dict(type='MLLAAttention')))
