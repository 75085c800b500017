# A small Mask2Former from scratch on the generated shapes, on the CPU: the demo's, before the gates.
# Data: python tools/dataset_converters/make_shapes.py data/shapes
_base_ = 'mask2former_r50_8xb2-160k_ade20k-512x512.py'

crop_size = (128, 128)
num_classes = 6
attention = dict(embed_dims=128, num_heads=4)
model = dict(
    data_preprocessor=dict(size=crop_size),
    backbone=dict(
        depth=18, norm_cfg=dict(type='BN', requires_grad=True), init_cfg=None),
    decode_head=dict(
        in_channels=[64, 128, 256, 512],
        feat_channels=128,
        out_channels=128,
        num_classes=num_classes,
        num_queries=20,
        pixel_decoder=dict(
            encoder=dict(
                num_layers=1,
                layer_cfg=dict(
                    self_attn_cfg=dict(embed_dims=128, num_heads=4),
                    ffn_cfg=dict(embed_dims=128, feedforward_channels=256))),
            positional_encoding=dict(num_feats=64)),
        positional_encoding=dict(num_feats=64),
        transformer_decoder=dict(
            num_layers=3,
            layer_cfg=dict(
                self_attn_cfg=attention,
                cross_attn_cfg=attention,
                ffn_cfg=dict(embed_dims=128, feedforward_channels=256))),
        loss_cls=dict(class_weight=[1.0] * num_classes + [0.1]),
        train_cfg=dict(num_points=1024)))

dataset_type = 'BaseSegDataset'
data_root = 'data/shapes/ade'
metainfo = dict(
    classes=('circle', 'square', 'triangle', 'star', 'ring', 'cross'),
    palette=[[230, 60, 60], [220, 200, 40], [60, 190, 60], [40, 190, 200],
             [70, 80, 220], [200, 60, 200]])
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(type='RandomFlip', prob=[0.25, 0.25], direction=['horizontal', 'vertical']),
    dict(type='PackSegInputs')
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(type='PackSegInputs')
]
dataset = dict(
    _delete_=True,
    type=dataset_type,
    data_root=data_root,
    metainfo=metainfo,
    reduce_zero_label=True,
    img_suffix='.jpg',
    seg_map_suffix='.png')
train_dataloader = dict(
    batch_size=8,
    num_workers=1,
    dataset=dict(
        data_prefix=dict(img_path='images/training', seg_map_path='annotations/training'),
        pipeline=train_pipeline,
        **dataset))
val_dataloader = dict(
    batch_size=8,
    num_workers=1,
    dataset=dict(
        data_prefix=dict(img_path='images/validation', seg_map_path='annotations/validation'),
        pipeline=test_pipeline,
        **dataset))
test_dataloader = val_dataloader

optim_wrapper = dict(
    constructor='mmgate.GroupedOptimWrapperConstructor',
    optimizer=dict(lr=4e-4),
    paramwise_cfg=dict(custom_keys=dict(backbone=dict(lr_mult=1.0))))
train_cfg = dict(max_iters=1000, val_interval=500)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=50),
    dict(type='PolyLR', eta_min=0, power=0.9, begin=50, end=1000, by_epoch=False)
]
default_hooks = dict(
    logger=dict(interval=10),
    checkpoint=dict(interval=500, max_keep_ckpts=2))
auto_scale_lr = dict(base_batch_size=8)
