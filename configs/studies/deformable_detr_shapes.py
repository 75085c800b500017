# PLuG in a small Deformable DETR with box refinement on hard shapes: where, which start, with and without the residual.
# Data: python tools/dataset_converters/make_shapes.py data/shapes_hard --difficulty hard --num-train 800 --num-val 200 --num-objects 0
# Run:  python tools/analysis_tools/study.py configs/studies/deformable_detr_shapes.py
_base_ = '_base_/shapes_detection.py'

runs = dict(
    vanilla='configs/_base_/deformable-detr-refine_r18_1xb8-12e_shapes.py',
    plug='configs/plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py',
    plug_encoder='configs/studies/deformable_detr_shapes/plug-encoder.py',
    plug_decoder='configs/studies/deformable_detr_shapes/plug-decoder.py',
    plug_paper_init='configs/studies/deformable_detr_shapes/plug-paper-init.py',
    plug_no_residual='configs/studies/deformable_detr_shapes/plug-no-residual.py')
baselines = dict(plug_no_residual='plug_paper_init')  # it starts as that one does; default: vanilla
seeds = [0, 1, 2, 3, 4]
metric = 'coco/bbox_mAP'
options = {
    'model.backbone.base_channels': 32,
    'model.neck.in_channels': [64, 128, 256],
    'train_cfg.max_epochs': 5,
    'train_cfg.val_interval': 2,
    'param_scheduler.1.milestones': [4]}
budgets = dict(
    gpu=dict({
        'model.backbone.base_channels': 64,
        'model.neck.in_channels': [128, 256, 512],
        'train_cfg.max_epochs': 48,
        'train_cfg.val_interval': 12,
        'param_scheduler.1.end': 48,
        'param_scheduler.1.milestones': [40]}))
