# The one comparison of plug_bccd.py that came out in favour of a gate, with other seeds and a control.
# Data and backbone: configs/real/README.md
# Run: python tools/analysis_tools/study.py configs/studies/plug_bccd_again.py
_base_ = '_base_/real_detection.py'

runs = dict(
    vanilla='configs/real/bccd/deformable-detr-refine_lite0_1xb4-12e_bccd.py',
    rate_5='configs/studies/plug_bccd/rate-5.py',
    weights_rate_5='configs/studies/plug_bccd/weights-rate-5.py')
seeds = [4, 5, 6, 7]
