_base_ = '../../real/bccd/plug-deformable-detr-refine_lite0_1xb4-12e_bccd.py'
model = dict(attention=dict(path='decoder.layers.*.cross_attn'))
