# Gates in the self-attention of a small Mask2Former's decoder on street scenes, from the backbone's ImageNet weights.
# Data and backbone: configs/real/README.md
# Run: python tools/analysis_tools/study.py configs/studies/gates_camvid.py
runs = dict(
    vanilla='configs/real/camvid/mask2former_lite0_1xb4-1k_camvid-160x128.py',
    plug='configs/studies/gates_camvid/plug.py',
    sdpa_gate='configs/studies/gates_camvid/sdpa-gate.py',
    dgsa='configs/real/camvid/dgsa-mask2former_lite0_1xb4-1k_camvid-160x128.py')
seeds = [0, 1, 2]
metric = 'mIoU'
options = {
    'train_cfg.max_iters': 400,
    'train_cfg.val_interval': 400,
    'param_scheduler.1.end': 400,
    'default_hooks.checkpoint.interval': 400}
