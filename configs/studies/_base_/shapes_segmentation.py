# Settings that the studies of segmentors on hard shapes share.
options = {
    'train_dataloader.dataset.data_root': 'data/shapes_hard/ade',
    'val_dataloader.dataset.data_root': 'data/shapes_hard/ade',
    'test_dataloader.dataset.data_root': 'data/shapes_hard/ade',
    'model.backbone.base_channels': 32,
    'model.decode_head.in_channels': [32, 64, 128, 256],
    'default_hooks.logger.interval': 50}
budgets = dict(
    check=dict({
        'train_cfg.max_iters': 2,
        'train_cfg.val_interval': 2,
        'default_hooks.checkpoint.interval': 2,
        'val_dataloader.dataset.indices': 8,
        'test_dataloader.dataset.indices': 8}))
