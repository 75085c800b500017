# Trains the Deformable DETR from whose checkpoint finetune_detr.py starts.
_base_ = '_base_/shapes_detection.py'

runs = dict(vanilla='configs/_base_/deformable-detr-refine_r18_1xb8-12e_shapes.py')
seeds = [0]
metric = 'coco/bbox_mAP'
options = {
    'model.backbone.base_channels': 32,
    'model.neck.in_channels': [64, 128, 256],
    'train_cfg.val_interval': 12}
