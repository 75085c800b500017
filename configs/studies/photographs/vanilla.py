# Two photographs of COCO, learnt by heart: they are trained on and looked at. It starts from the model of
# finetune_detr_start.py: --cfg-options load_from=work_dirs/finetune_detr_start/vanilla/seed0/epoch_12.pth
_base_ = '../finetune_detr/vanilla.py'

data_root = 'data/coco_sample/'
metainfo = dict(classes=('person', 'truck', 'horse', 'sports ball'))
model = dict(
    backbone=dict(base_channels=32),
    neck=dict(in_channels=[64, 128, 256]),
    bbox_head=dict(num_classes=4))
photographs = dict(
    data_root=data_root,
    metainfo=metainfo,
    ann_file='annotations/instances_val2017.json',
    data_prefix=dict(img='val2017/'))
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='RandomFlip', prob=0.5),
    dict(
        type='RandomChoiceResize',
        scales=[(side, side) for side in (256, 288, 320)],
        keep_ratio=True),
    dict(type='PackDetInputs')
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(288, 288), keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'))
]
train_dataloader = dict(
    batch_size=2,
    batch_sampler=None,
    sampler=dict(type='InfiniteSampler'),
    dataset=dict(**photographs, pipeline=train_pipeline))
val_dataloader = dict(batch_size=1, dataset=dict(**photographs, pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/instances_val2017.json')
test_evaluator = val_evaluator

train_cfg = dict(_delete_=True, type='IterBasedTrainLoop', max_iters=560, val_interval=560)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=50),
    dict(type='MultiStepLR', by_epoch=False, begin=0, end=560, milestones=[450], gamma=0.1)
]
default_hooks = dict(logger=dict(interval=50), checkpoint=dict(by_epoch=False, interval=560))
log_processor = dict(by_epoch=False)
