# The attention of a small PVT in Mask R-CNN on hard shapes, all in one shell: softmax over the whole map and over a
# reduced one, agents, SAGA with and without its parts, focused linear attention.
# Data: python tools/dataset_converters/make_shapes.py data/shapes_hard --difficulty hard --num-train 800 --num-val 200 --num-objects 0
# Run:  python tools/analysis_tools/study.py configs/studies/pvt_shapes.py
_base_ = '_base_/shapes_detection.py'

runs = dict(
    softmax='configs/studies/pvt_shapes/softmax.py',
    softmax_reduced='configs/studies/pvt_shapes/softmax-reduced.py',
    agent='configs/agent/mask_rcnn/agent-mask-rcnn_pvt-demo_1xb8-8e_shapes.py',
    saga='configs/saga/mask_rcnn/saga-mask-rcnn_pvt-demo_1xb8-8e_shapes.py',
    saga_no_gate='configs/studies/pvt_shapes/saga-no-gate.py',
    saga_no_dwc='configs/studies/pvt_shapes/saga-no-dwc.py',
    saga_no_output_augmentation='configs/studies/pvt_shapes/saga-no-output-augmentation.py',
    focused='configs/studies/pvt_shapes/focused.py')
baselines = dict(saga_no_gate='saga', saga_no_dwc='saga', saga_no_output_augmentation='saga')  # default: softmax
seeds = [0, 1, 2, 3, 4]
metric = 'coco/segm_mAP'
options = {
    'train_dataloader.dataset.indices': 400,
    'train_cfg.max_epochs': 6,
    'train_cfg.val_interval': 6,
    'param_scheduler.1.end': 6,
    'param_scheduler.1.T_max': 6,
    'default_hooks.checkpoint.interval': 1}
budgets = dict(
    gpu=dict({
        'train_cfg.max_epochs': 36,
        'train_cfg.val_interval': 12,
        'param_scheduler.1.end': 36,
        'param_scheduler.1.T_max': 36}))
