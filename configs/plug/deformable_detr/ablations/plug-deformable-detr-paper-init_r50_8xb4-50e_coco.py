_base_ = '../plug-deformable-detr_r50_8xb4-50e_coco.py'
# the gate starts as detectors start linear layers, not as the identity; the partner of no-residual
model = dict(attention=dict(init='paper'))
