# A small RetinaNet with a PVT from scratch, on micrographs of blood. Data: ../README.md
_base_ = 'mmdet::pvt/retinanet_pvt-t_fpn_1x_coco.py'
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

data_root = 'data/bccd/'
metainfo = dict(classes=('Platelets', 'RBC', 'WBC'))
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='Resize', scale=(192, 144), keep_ratio=True),
    dict(type='RandomFlip', prob=[0.25, 0.25, 0.25], direction=['horizontal', 'vertical', 'diagonal']),
    dict(type='PackDetInputs')
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(192, 144), keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'))
]
train_dataloader = dict(
    batch_size=4,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        data_root=data_root,
        metainfo=metainfo,
        ann_file='annotations/train.json',
        data_prefix=dict(img='images/'),
        pipeline=train_pipeline))
val_dataloader = dict(
    batch_size=4,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        data_root=data_root,
        metainfo=metainfo,
        ann_file='annotations/val.json',
        data_prefix=dict(img='images/'),
        pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/val.json')
test_evaluator = val_evaluator

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
