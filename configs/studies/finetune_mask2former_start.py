# Trains the Mask2Former from whose checkpoint finetune_mask2former.py starts.
_base_ = '_base_/shapes_segmentation.py'

runs = dict(vanilla='configs/_base_/mask2former_r18_1xb8-1k_shapes-128x128.py')
seeds = [0]
metric = 'mIoU'
options = {'train_cfg.val_interval': 1000}
