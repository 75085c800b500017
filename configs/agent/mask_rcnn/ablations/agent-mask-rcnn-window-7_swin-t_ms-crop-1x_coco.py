_base_ = '../agent-mask-rcnn_swin-t_ms-crop-1x_coco.py'

# Table 3: windows of 7 x 7
# The authors published no such weights: from Swin's own, which fill what is shared.
model = dict(backbone=dict(attention=dict(window=7), agent_nums=(9, 16, 49, 49),
        init_cfg=dict(_delete_=True, type='Pretrained', checkpoint={{_base_.pretrained}})))
