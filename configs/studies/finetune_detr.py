# A trained Deformable DETR is trained for 100 more steps: vanilla, with PLuG, with PLuG's gates alone, with an SDPA gate.
# Data:  python tools/dataset_converters/make_shapes.py data/shapes_hard --difficulty hard --num-train 800 --num-val 200 --num-objects 0
# Start: python tools/analysis_tools/study.py configs/studies/finetune_detr_start.py
# Run:   python tools/analysis_tools/study.py configs/studies/finetune_detr.py
_base_ = '_base_/shapes_detection.py'

runs = dict(
    vanilla='configs/studies/finetune_detr/vanilla.py',
    plug='configs/studies/finetune_detr/plug.py',
    plug_gates_alone='configs/studies/finetune_detr/plug-gates-alone.py',
    plug_gates_alone_fast='configs/studies/finetune_detr/plug-gates-alone-fast.py',
    sdpa_gate='configs/studies/finetune_detr/sdpa-gate.py')
seeds = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
metric = 'coco/bbox_mAP'
options = {
    'load_from': 'work_dirs/finetune_detr_start/vanilla/seed0/epoch_12.pth',
    'model.backbone.base_channels': 32,
    'model.neck.in_channels': [64, 128, 256],
    'train_dataloader.dataset.indices': 400,
    'optim_wrapper.optimizer.lr': 1e-4,
    'train_cfg.max_epochs': 2,
    'train_cfg.val_interval': 2,
    'param_scheduler.1.milestones': [1]}
