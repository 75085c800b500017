_base_ = 'deformable-detr-refine_r50_8xb4-50e_coco.py'
model = dict(as_two_stage=True)
