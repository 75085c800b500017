# A small Mask R-CNN from scratch on the generated shapes, on the CPU; the backbone demos inherit it.
# Data: python tools/dataset_converters/make_shapes.py data/shapes
_base_ = 'mask-rcnn_pvt-t_1x_coco.py'

num_classes = 6
roi_layer = dict(sampling_ratio=1)
model = dict(
    backbone=dict(
        pretrain_img_size=128,
        embed_dims=32,
        num_layers=[1, 1, 2, 1],
        num_heads=[1, 2, 4, 8],
        mlp_ratios=[4, 4, 4, 4],
        drop_path_rate=0.0,
        init_cfg=None),
    neck=dict(in_channels=[32, 64, 128, 256], out_channels=64, num_outs=4),
    rpn_head=dict(
        in_channels=64,
        feat_channels=64,
        anchor_generator=dict(scales=[6], strides=[4, 8, 16, 32])),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=64, roi_layer=roi_layer),
        bbox_head=dict(in_channels=64, fc_out_channels=256, num_classes=num_classes),
        mask_roi_extractor=dict(out_channels=64, roi_layer=roi_layer),
        mask_head=dict(
            num_convs=2, in_channels=64, conv_out_channels=64, num_classes=num_classes)),
    train_cfg=dict(
        rpn_proposal=dict(nms_pre=300, max_per_img=100),
        rcnn=dict(sampler=dict(num=64))),
    test_cfg=dict(
        rpn=dict(nms_pre=300, max_per_img=100), rcnn=dict(max_per_img=30)))

data_root = 'data/shapes/'
metainfo = dict(classes=('circle', 'square', 'triangle', 'star', 'ring', 'cross'))
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='RandomFlip', prob=[0.25, 0.25, 0.25], direction=['horizontal', 'vertical', 'diagonal']),
    dict(type='PackDetInputs')
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(128, 128), keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'))
]
train_dataloader = dict(
    batch_size=8,
    num_workers=1,
    dataset=dict(
        data_root=data_root,
        metainfo=metainfo,
        ann_file='annotations/instances_train.json',
        data_prefix=dict(img='train/'),
        pipeline=train_pipeline))
val_dataloader = dict(
    batch_size=8,
    num_workers=1,
    dataset=dict(
        data_root=data_root,
        metainfo=metainfo,
        ann_file='annotations/instances_val.json',
        data_prefix=dict(img='val/'),
        pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/instances_val.json')
test_evaluator = val_evaluator

optim_wrapper = dict(
    optimizer=dict(lr=1e-3, weight_decay=0.05), clip_grad=dict(max_norm=5.0))
train_cfg = dict(max_epochs=8, val_interval=4)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.05, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=True, begin=0, end=8, T_max=8, convert_to_iter_based=True)
]
default_hooks = dict(
    logger=dict(interval=10), checkpoint=dict(interval=8, max_keep_ckpts=2))
auto_scale_lr = dict(base_batch_size=8)
