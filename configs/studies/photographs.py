# The models of the picture with which the README opens: no comparison, both learn two photographs by heart.
# Data:  two images of COCO val2017 in ../shared/data/coco_sample
# Start: python tools/analysis_tools/study.py configs/studies/finetune_detr_start.py
# Run:   python tools/analysis_tools/study.py configs/studies/photographs.py
runs = dict(
    vanilla='configs/studies/photographs/vanilla.py',
    gated='configs/studies/photographs/gated.py')
seeds = [0]
metric = 'coco/bbox_mAP'
options = {'load_from': 'work_dirs/finetune_detr_start/vanilla/seed0/epoch_12.pth'}
