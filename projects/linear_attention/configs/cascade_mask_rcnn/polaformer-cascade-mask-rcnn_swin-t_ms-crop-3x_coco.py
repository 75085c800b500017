_base_ = '../../../../configs/vanilla/cascade_mask_rcnn/cascade-mask-rcnn_swin-t_ms-crop-3x_coco.py'
custom_imports = dict(imports=['mmgate', 'projects.linear_attention'], allow_failed_imports=False)

# From Swin's own ImageNet weights, which fill what is shared; the papers trained their own.
model = dict(backbone=dict(type='mmgate.LinearSwin', attention=dict(type='PolaFormerAttention')))
optim_wrapper = dict(constructor='mmgate.GateOptimWrapperConstructor')
