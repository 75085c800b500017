_base_ = '../agent-mask-rcnn_swin-t_ms-crop-1x_coco.py'

# Table 6: no depthwise convolution
# The authors published no such weights: from Swin's own, which fill what is shared.
model = dict(backbone=dict(attention=dict(dwc=False),
        init_cfg=dict(_delete_=True, type='Pretrained', checkpoint={{_base_.pretrained}})))
