_base_ = '../plug-deformable-detr_r50_8xb4-50e_coco.py'
# Table 8: tanh on the gate
model = dict(attention=dict(activation='tanh'))
