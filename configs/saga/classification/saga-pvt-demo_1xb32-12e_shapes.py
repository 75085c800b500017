# Trained by make demo-pretrain, a classifier of single shapes to start a detector from.
# Data: python tools/dataset_converters/make_shapes.py data/shapes
_base_ = '../../_base_/classification/imagenet_8xb128-300e.py'

# A folder's place in the alphabet is its label.
classes = ('circle', 'cross', 'ring', 'square', 'star', 'triangle')
model = dict(
    data_preprocessor=dict(num_classes=6, batch_augments=None),
    backbone=dict(
        type='mmgate.SAGAPVT',
        pretrain_img_size=128,
        embed_dims=32,
        num_layers=[1, 1, 2, 1],
        num_heads=[1, 2, 4, 8],
        mlp_ratios=[4, 4, 4, 4],
        out_indices=(3, ),
        drop_path_rate=0.0),
    head=dict(num_classes=6, in_channels=256))

# The colour tells the classes apart as much as the outline does, so no augmentation changes it.
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='RandomFlip', prob=[0.25, 0.25, 0.25], direction=['horizontal', 'vertical', 'diagonal']),
    dict(type='PackInputs')
]
test_pipeline = [dict(type='LoadImageFromFile'), dict(type='PackInputs')]
dataset = dict(
    data_root='data/shapes/imagenet', metainfo=dict(classes=classes))
train_dataloader = dict(
    batch_size=32,
    num_workers=1,
    dataset=dict(
        _delete_=True, type='CustomDataset', data_prefix='train', pipeline=train_pipeline, **dataset))
val_dataloader = dict(
    batch_size=32,
    num_workers=1,
    dataset=dict(
        _delete_=True, type='CustomDataset', data_prefix='val', pipeline=test_pipeline, **dataset))
test_dataloader = val_dataloader
val_evaluator = dict(topk=(1, ))
test_evaluator = val_evaluator

optim_wrapper = dict(optimizer=dict(lr=1e-3), clip_grad=dict(max_norm=5.0))
train_cfg = dict(max_epochs=12, val_interval=4)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.05, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=True, begin=0, end=12, T_max=12, convert_to_iter_based=True)
]
default_hooks = dict(logger=dict(interval=10), checkpoint=dict(interval=12))
auto_scale_lr = dict(base_batch_size=32)
