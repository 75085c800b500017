# Trains the Deformable DETR from whose checkpoint gate_rate_bccd.py starts.
# Data and backbone: configs/real/README.md
runs = dict(vanilla='configs/real/bccd/deformable-detr-refine_lite0_1xb4-12e_bccd.py')
seeds = [0]
metric = 'coco/bbox_mAP'
