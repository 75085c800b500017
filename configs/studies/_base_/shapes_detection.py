# Settings that the studies of detectors on hard shapes share.
options = {
    'train_dataloader.dataset.data_root': 'data/shapes_hard/',
    'val_dataloader.dataset.data_root': 'data/shapes_hard/',
    'test_dataloader.dataset.data_root': 'data/shapes_hard/',
    'val_evaluator.ann_file': 'data/shapes_hard/annotations/instances_val.json',
    'test_evaluator.ann_file': 'data/shapes_hard/annotations/instances_val.json',
    'default_hooks.logger.interval': 50}
budgets = dict(
    check=dict({
        'train_cfg.max_epochs': 1,
        'train_cfg.val_interval': 1,
        'train_dataloader.dataset.indices': 16,
        'val_dataloader.dataset.indices': 8,
        'test_dataloader.dataset.indices': 8}))
