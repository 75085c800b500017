# PLuG in a small Deformable DETR with box refinement on shapes: where, which start, with and without the residual.
# Data: python tools/dataset_converters/make_shapes.py data/shapes
# Run:  python tools/analysis_tools/study.py configs/studies/deformable_detr_shapes.py
# Not run yet: there are no results.
runs = dict(
    vanilla='configs/_base_/deformable-detr-refine_r18_1xb8-12e_shapes.py',
    plug='configs/plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py',
    plug_encoder='configs/studies/deformable_detr_shapes/plug-encoder.py',
    plug_decoder='configs/studies/deformable_detr_shapes/plug-decoder.py',
    plug_paper_init='configs/studies/deformable_detr_shapes/plug-paper-init.py',
    plug_no_residual='configs/studies/deformable_detr_shapes/plug-no-residual.py')
seeds = [0, 1, 2, 3, 4]
metric = 'coco/bbox_mAP'
budgets = dict(
    gpu=dict({'train_cfg.max_epochs': 48, 'param_scheduler.1.milestones': [40], 'train_cfg.val_interval': 12}),
    check=dict({
        'train_cfg.max_epochs': 1,
        'train_cfg.val_interval': 1,
        'train_dataloader.dataset.indices': 16,
        'val_dataloader.dataset.indices': 8,
        'test_dataloader.dataset.indices': 8}))
