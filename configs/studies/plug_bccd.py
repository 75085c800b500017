# PLuG in a small Deformable DETR on micrographs of blood, from the backbone's ImageNet weights: which start, which
# learning rate of the gates, and which layers.
# Data and backbone: configs/real/README.md
# Run: python tools/analysis_tools/study.py configs/studies/plug_bccd.py
_base_ = '_base_/real_detection.py'

runs = dict(
    vanilla='configs/real/bccd/deformable-detr-refine_lite0_1xb4-12e_bccd.py',
    rate_1='configs/real/bccd/plug-deformable-detr-refine_lite0_1xb4-12e_bccd.py',
    rate_5='configs/studies/plug_bccd/rate-5.py',
    rate_20='configs/studies/plug_bccd/rate-20.py',
    rate_100='configs/studies/plug_bccd/rate-100.py',
    paper_start='configs/studies/plug_bccd/paper-start.py',
    encoder='configs/studies/plug_bccd/encoder.py',
    decoder='configs/studies/plug_bccd/decoder.py')
seeds = [0, 1, 2, 3]
