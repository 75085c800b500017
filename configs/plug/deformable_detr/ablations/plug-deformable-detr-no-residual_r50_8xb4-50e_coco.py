_base_ = '../plug-deformable-detr_r50_8xb4-50e_coco.py'
# Table 12: logits times G, not 1 + G
model = dict(attention=dict(residual=False))
