_base_ = '../plug-deformable-detr_r50_8xb4-50e_coco.py'
# Eq. 17 (Table 10 has it for DeiT): the gate after the softmax
model = dict(attention=dict(position='post_softmax'))
