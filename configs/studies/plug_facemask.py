# PLuG's starts and learning rates as in plug_bccd.py, with its control, on photographs with many small faces.
# Data and backbone: configs/real/README.md
# Run: python tools/analysis_tools/study.py configs/studies/plug_facemask.py
_base_ = '_base_/real_detection.py'

runs = dict(
    vanilla='configs/real/facemask/deformable-detr-refine_lite0_1xb4-12e_facemask.py',
    rate_1='configs/real/facemask/plug-deformable-detr-refine_lite0_1xb4-12e_facemask.py',
    rate_5='configs/studies/plug_facemask/rate-5.py',
    rate_20='configs/studies/plug_facemask/rate-20.py',
    paper_start='configs/studies/plug_facemask/paper-start.py',
    weights_rate_5='configs/studies/plug_facemask/weights-rate-5.py')
seeds = [0, 1, 2]
