# The attentions of pvt_shapes on larger maps (64 x 64 in the first stage), where linear attention is meant to serve.
# Data: python tools/dataset_converters/make_shapes.py data/shapes_256 --size 256 --difficulty hard --num-train 200 --num-val 100 --num-objects 0
# Run:  python tools/analysis_tools/study.py configs/studies/pvt_shapes_256.py
_base_ = '_base_/shapes_detection.py'

runs = dict(
    softmax='configs/studies/pvt_shapes/softmax.py',
    softmax_reduced='configs/studies/pvt_shapes/softmax-reduced.py',
    agent='configs/agent/mask_rcnn/agent-mask-rcnn_pvt-demo_1xb8-8e_shapes.py',
    saga='configs/saga/mask_rcnn/saga-mask-rcnn_pvt-demo_1xb8-8e_shapes.py',
    focused='configs/studies/pvt_shapes/focused.py')
seeds = [0, 1, 2, 3, 4]
metric = 'coco/segm_mAP'
options = {
    'train_dataloader.dataset.data_root': 'data/shapes_256/',
    'val_dataloader.dataset.data_root': 'data/shapes_256/',
    'test_dataloader.dataset.data_root': 'data/shapes_256/',
    'val_evaluator.ann_file': 'data/shapes_256/annotations/instances_val.json',
    'test_evaluator.ann_file': 'data/shapes_256/annotations/instances_val.json',
    'val_dataloader.dataset.pipeline.1.scale': (256, 256),
    'test_dataloader.dataset.pipeline.1.scale': (256, 256),
    'model.backbone.pretrain_img_size': 256,
    'train_cfg.max_epochs': 6,
    'train_cfg.val_interval': 6,
    'param_scheduler.1.end': 6,
    'param_scheduler.1.T_max': 6,
    'default_hooks.checkpoint.interval': 1}
