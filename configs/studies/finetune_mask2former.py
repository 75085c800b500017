# A trained Mask2Former is trained for 100 more steps: vanilla, with PLuG, with PLuG's gates alone, with an SDPA gate.
# Data:  python tools/dataset_converters/make_shapes.py data/shapes_hard --difficulty hard --num-train 800 --num-val 200 --num-objects 0
# Start: python tools/analysis_tools/study.py configs/studies/finetune_mask2former_start.py
# Run:   python tools/analysis_tools/study.py configs/studies/finetune_mask2former.py
_base_ = '_base_/shapes_segmentation.py'

runs = dict(
    vanilla='configs/studies/finetune_mask2former/vanilla.py',
    plug='configs/studies/finetune_mask2former/plug.py',
    plug_gates_alone='configs/studies/finetune_mask2former/plug-gates-alone.py',
    plug_gates_alone_fast='configs/studies/finetune_mask2former/plug-gates-alone-fast.py',
    sdpa_gate='configs/studies/finetune_mask2former/sdpa-gate.py')
seeds = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
metric = 'mIoU'
options = {
    'load_from': 'work_dirs/finetune_mask2former_start/vanilla/seed0/iter_1000.pth',
    'optim_wrapper.optimizer.lr': 1e-4,
    'train_cfg.max_iters': 100,
    'train_cfg.val_interval': 100,
    'param_scheduler.1.end': 100,
    'default_hooks.checkpoint.interval': 100}
