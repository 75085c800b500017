_base_ = '../plug-deformable-detr_r50_8xb4-50e_coco.py'
# Table 9, row 2: head-specific, level-specific, point-specific
model = dict(attention=dict(granularity='head_level_point'))
