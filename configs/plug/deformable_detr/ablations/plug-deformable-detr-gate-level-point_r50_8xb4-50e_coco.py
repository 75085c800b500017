_base_ = '../plug-deformable-detr_r50_8xb4-50e_coco.py'
# Table 9, row 4: head-shared, level-specific, point-specific
model = dict(attention=dict(granularity='level_point'))
