_base_ = '../plug-deformable-detr_r50_8xb4-50e_coco.py'
# Table 9, row 3: head-specific, level-shared, point-shared
model = dict(attention=dict(granularity='head'))
