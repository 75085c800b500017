_base_ = 'deformable-detr-singlescale_r50_8xb4-50e_coco.py'
# The last stage dilated: the one level has stride 16.
model = dict(backbone=dict(strides=(1, 2, 2, 1), dilations=(1, 1, 1, 2)))
