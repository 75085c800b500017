_base_ = '../plug-deformable-detr_r50_8xb4-50e_coco.py'
# Table 9, row 1, the default: head-specific, level-specific, point-shared
model = dict(attention=dict(granularity='head_level'))
