_base_ = '../../saga/mask_rcnn/saga-mask-rcnn_pvt-demo_1xb8-8e_shapes.py'
model = dict(backbone=dict(attention=dict(gate=False)))
