# A small RetinaNet with a PVT from scratch, on micrographs of blood. Data: ../README.md
_base_ = ['mmdet::pvt/retinanet_pvt-t_fpn_1x_coco.py', '../../_base_/datasets/bccd.py']
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

model = dict(
    data_preprocessor=dict(mean=[127.5] * 3, std=[127.5] * 3),
    backbone=dict(
        pretrain_img_size=128,
        embed_dims=32,
        num_layers=[1, 1, 2, 1],
        num_heads=[1, 2, 4, 8],
        mlp_ratios=[4, 4, 4, 4],
        drop_path_rate=0.0,
        init_cfg=None),
    # red cells are about 30 pixels wide at this size, platelets 12
    neck=dict(
        in_channels=[32, 64, 128, 256],
        out_channels=64,
        start_level=0,
        add_extra_convs=False,
        num_outs=4),
    bbox_head=dict(
        num_classes=3,
        in_channels=64,
        feat_channels=64,
        stacked_convs=2,
        anchor_generator=dict(octave_base_scale=3, strides=[4, 8, 16, 32])))

# the data's settings, out of the dict that the second base has them in
bccd = _base_.pop('bccd')
data_root = bccd.data_root
metainfo = bccd.metainfo
train_pipeline = bccd.train_pipeline
test_pipeline = bccd.test_pipeline
train_dataloader = bccd.train_dataloader
val_dataloader = bccd.val_dataloader
test_dataloader = val_dataloader
val_evaluator = bccd.evaluator
test_evaluator = val_evaluator
del bccd

optim_wrapper = dict(
    constructor='mmgate.GateOptimWrapperConstructor',
    optimizer=dict(lr=1e-3, weight_decay=0.05),
    clip_grad=dict(max_norm=5.0))
train_cfg = dict(max_epochs=12, val_interval=6)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.05, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=True, begin=0, end=12, T_max=12, convert_to_iter_based=True)
]
default_hooks = dict(logger=dict(interval=20), checkpoint=dict(interval=6, max_keep_ckpts=2))
auto_scale_lr = dict(base_batch_size=4)
