# Settings that the studies of detectors on real images share.
metric = 'coco/bbox_mAP'
options = {
    'train_cfg.max_epochs': 4,
    'train_cfg.val_interval': 4,
    'param_scheduler.1.milestones': [3]}
