_base_ = '../../real/facemask/plug-deformable-detr-refine_lite0_1xb4-12e_facemask.py'
model = dict(attention=dict(init='paper'))
