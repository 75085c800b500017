# A small Mask2Former on street scenes, from a backbone that ImageNet trained: ../README.md has both.
_base_ = '../../_base_/mask2former_r18_1xb8-1k_shapes-128x128.py'

crop_size = (128, 160)
num_classes = 11
model = dict(
    data_preprocessor=dict(mean=[127.5] * 3, std=[127.5] * 3, size=crop_size),
    backbone=dict(
        _delete_=True,
        type='mmpretrain.TIMMBackbone',
        model_name='tf_efficientnet_lite0',
        features_only=True,
        out_indices=(1, 2, 3, 4),
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/tf_efficientnet_lite0.pth')),
    decode_head=dict(
        in_channels=[24, 40, 112, 320],
        num_classes=num_classes,
        loss_cls=dict(class_weight=[1.0] * num_classes + [0.1])))

data_root = 'data/camvid'
metainfo = dict(
    classes=('Sky', 'Building', 'Pole', 'Road', 'Pavement', 'Tree', 'SignSymbol', 'Fence', 'Car',
             'Pedestrian', 'Bicyclist'),
    palette=[[128, 128, 128], [128, 0, 0], [192, 192, 128], [128, 64, 128], [60, 40, 222],
             [128, 128, 0], [192, 128, 128], [64, 64, 128], [64, 0, 128], [64, 64, 0],
             [0, 128, 192]])
resize = dict(type='Resize', scale=(160, 120), keep_ratio=True)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations'),
    resize,
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackSegInputs')
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    resize,
    dict(type='LoadAnnotations'),
    dict(type='PackSegInputs')
]
dataset = dict(
    data_root=data_root, metainfo=metainfo, reduce_zero_label=False)
train_dataloader = dict(
    batch_size=4,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        data_prefix=dict(img_path='images/train', seg_map_path='labels/train'),
        pipeline=train_pipeline,
        **dataset))
val_dataloader = dict(
    batch_size=4,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        data_prefix=dict(img_path='images/val', seg_map_path='labels/val'),
        pipeline=test_pipeline,
        **dataset))
test_dataloader = val_dataloader

optim_wrapper = dict(
    constructor='mmgate.GateOptimWrapperConstructor',
    paramwise_cfg=dict(custom_keys=dict(backbone=dict(lr_mult=0.1))))
default_hooks = dict(logger=dict(interval=50), checkpoint=dict(interval=500))
auto_scale_lr = dict(base_batch_size=4)
