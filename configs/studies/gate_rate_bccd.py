# A trained Deformable DETR is trained further, with PLuG's gates at 1, 5, 20 and 100 times the model's learning rate.
# Data and backbone: configs/real/README.md
# Start: python tools/analysis_tools/study.py configs/studies/gate_rate_bccd_start.py
# Run:   python tools/analysis_tools/study.py configs/studies/gate_rate_bccd.py
runs = dict(
    vanilla='configs/real/bccd/deformable-detr-refine_lite0_1xb4-2e_bccd.py',
    rate_1='configs/studies/gate_rate_bccd/rate-1.py',
    rate_5='configs/studies/gate_rate_bccd/rate-5.py',
    rate_20='configs/real/bccd/plug-deformable-detr-refine_lite0_1xb4-2e_bccd.py',
    rate_100='configs/studies/gate_rate_bccd/rate-100.py')
seeds = [0, 1, 2]
metric = 'coco/bbox_mAP'
