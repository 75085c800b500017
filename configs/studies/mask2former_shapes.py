# Gates in the self-attention of a small Mask2Former's decoder on hard shapes.
# Data: python tools/dataset_converters/make_shapes.py data/shapes_hard --difficulty hard --num-train 800 --num-val 200 --num-objects 0
# Run:  python tools/analysis_tools/study.py configs/studies/mask2former_shapes.py
_base_ = '_base_/shapes_segmentation.py'

runs = dict(
    vanilla='configs/_base_/mask2former_r18_1xb8-1k_shapes-128x128.py',
    plug='configs/plug/mask2former/plug-mask2former_r18_1xb8-1k_shapes-128x128.py',
    sdpa_gate='configs/studies/mask2former_shapes/sdpa-gate.py',
    dgsa='configs/studies/mask2former_shapes/dgsa.py')
seeds = [0, 1, 2, 3, 4]
metric = 'mIoU'
options = {
    'train_cfg.max_iters': 600,
    'train_cfg.val_interval': 300,
    'param_scheduler.1.end': 600,
    'default_hooks.checkpoint.interval': 300}
budgets = dict(
    gpu=dict({
        'model.backbone.base_channels': 64,
        'model.decode_head.in_channels': [64, 128, 256, 512],
        'train_cfg.max_iters': 8000,
        'train_cfg.val_interval': 2000,
        'param_scheduler.1.end': 8000,
        'default_hooks.checkpoint.interval': 2000}))
