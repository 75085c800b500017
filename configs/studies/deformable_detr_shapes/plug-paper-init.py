_base_ = '../../plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py'
model = dict(attention=dict(init='paper'))
