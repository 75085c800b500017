_base_ = 'plug-deformable-detr-paper-init_r50_8xb4-50e_coco.py'
# Table 12: logits times G, not 1 + G. An identity start would be G = 1, which undoes what the table tests.
model = dict(attention=dict(residual=False))
