_base_ = '../plug-deformable-detr_r50_8xb4-50e_coco.py'
# torch's default initialisation of the gate in the place of the identity start
model = dict(attention=dict(init='paper'))
