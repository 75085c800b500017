_base_ = '../../vanilla/mask_rcnn/mask-rcnn_swin-t_ms-crop-3x_coco.py'
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

# The authors have published no weights: init_cfg=None starts from scratch.
model = dict(
    backbone=dict(
        _delete_=True,
        type='mmgate.SAGASwin',
        arch='tiny',
        drop_path_rate=0.1,
        init_cfg=None))
optim_wrapper = dict(
    paramwise_cfg=dict(
        custom_keys=dict(position_encoding=dict(decay_mult=0.))))
