# A small Deformable DETR from scratch on the generated shapes, on the CPU: the demo's, before the gates.
# Data: python tools/dataset_converters/make_shapes.py data/shapes
_base_ = '../vanilla/deformable_detr/deformable-detr-refine_r50_8xb4-50e_coco.py'

model = dict(
    num_queries=30,
    backbone=dict(
        depth=18,
        frozen_stages=-1,
        norm_cfg=dict(requires_grad=True),
        norm_eval=False,
        init_cfg=None),
    neck=dict(in_channels=[128, 256, 512], out_channels=128),
    encoder=dict(
        num_layers=2,
        layer_cfg=dict(
            self_attn_cfg=dict(embed_dims=128),
            ffn_cfg=dict(embed_dims=128, feedforward_channels=256, ffn_drop=0.0))),
    decoder=dict(
        num_layers=2,
        layer_cfg=dict(
            self_attn_cfg=dict(embed_dims=128, dropout=0.0),
            cross_attn_cfg=dict(embed_dims=128),
            ffn_cfg=dict(embed_dims=128, feedforward_channels=256, ffn_drop=0.0))),
    positional_encoding=dict(num_feats=64),
    bbox_head=dict(num_classes=6, embed_dims=128),
    test_cfg=dict(max_per_img=30))

data_root = 'data/shapes/'
metainfo = dict(classes=('circle', 'square', 'triangle', 'star', 'ring', 'cross'))
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='RandomFlip', prob=[0.25, 0.25, 0.25], direction=['horizontal', 'vertical', 'diagonal']),
    dict(type='PackDetInputs')
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(128, 128), keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True),
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
    optimizer=dict(lr=4e-4, weight_decay=1e-4),
    paramwise_cfg=dict(custom_keys=dict(backbone=dict(lr_mult=1.0))))
train_cfg = dict(max_epochs=12, val_interval=6)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=50),
    dict(type='MultiStepLR', begin=0, end=12, by_epoch=True, milestones=[10], gamma=0.1)
]
default_hooks = dict(
    logger=dict(interval=10), checkpoint=dict(interval=1, max_keep_ckpts=2))
auto_scale_lr = dict(base_batch_size=8)
