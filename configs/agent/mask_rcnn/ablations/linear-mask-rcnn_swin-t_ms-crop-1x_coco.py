_base_ = '../../../vanilla/mask_rcnn/mask-rcnn_swin-t_ms-crop-1x_coco.py'
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

# Table 6: vanilla linear attention, in the blocks that have agents in Agent-Swin-T.
model = dict(
    backbone=dict(
        type='mmgate.LinearSwin',
        attention=dict(type='EnhancedLinearAttention', dwc=0),
        blocks=(2, 2, 6, 0)))
optim_wrapper = dict(constructor='mmgate.GateOptimWrapperConstructor')
