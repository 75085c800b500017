_base_ = 'mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py'
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

model = dict(
    backbone=dict(
        _delete_=True,
        type='PyramidVisionTransformer',
        num_layers=[2, 2, 2, 2],
        init_cfg=dict(
            checkpoint='https://github.com/whai362/PVT/releases/download/v2/pvt_tiny.pth')),
    neck=dict(in_channels=[64, 128, 320, 512]))
# 2e-4 as in Agent attention's files; its paper prints 1e-4.
optim_wrapper = dict(
    constructor='mmgate.GroupedOptimWrapperConstructor',
    optimizer=dict(_delete_=True, type='AdamW', lr=2e-4, weight_decay=1e-4))
