_base_ = '../saga-mask-rcnn_swin-t_ms-crop-1x_coco.py'
# Table 4
model = dict(backbone=dict(attention=dict(gate=False)))
