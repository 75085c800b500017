_base_ = 'plug-deformable-detr_r50_8xb4-50e_coco.py'
model = dict(attention=dict(path='decoder.layers.*.cross_attn'))
