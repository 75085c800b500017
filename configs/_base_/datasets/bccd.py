# Micrographs of blood with boxes around cells: configs/real/README.md has the source.
# mmengine refuses two bases that set one key, and mmdet's models set those of COCO. So all is in one dict here,
# from which a config takes what it needs.
bccd = dict(
    data_root='data/bccd/',
    metainfo=dict(classes=('Platelets', 'RBC', 'WBC')),
    train_pipeline=[
        dict(type='LoadImageFromFile'),
        dict(type='LoadAnnotations', with_bbox=True),
        dict(type='Resize', scale=(192, 144), keep_ratio=True),
        dict(type='RandomFlip', prob=[0.25, 0.25, 0.25], direction=['horizontal', 'vertical', 'diagonal']),
        dict(type='PackDetInputs')
    ],
    test_pipeline=[
        dict(type='LoadImageFromFile'),
        dict(type='Resize', scale=(192, 144), keep_ratio=True),
        dict(type='LoadAnnotations', with_bbox=True),
        dict(
            type='PackDetInputs',
            meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'))
    ])
bccd['dataset'] = dict(
    data_root=bccd['data_root'],
    metainfo=bccd['metainfo'],
    data_prefix=dict(img='images/'))
bccd['loader'] = dict(batch_size=4, num_workers=0, persistent_workers=False)
bccd['train_dataloader'] = dict(
    **bccd['loader'],
    dataset=dict(
        ann_file='annotations/train.json', pipeline=bccd['train_pipeline'], **bccd['dataset']))
bccd['val_dataloader'] = dict(
    **bccd['loader'],
    dataset=dict(ann_file='annotations/val.json', pipeline=bccd['test_pipeline'], **bccd['dataset']))
bccd['evaluator'] = dict(ann_file=bccd['data_root'] + 'annotations/val.json')
