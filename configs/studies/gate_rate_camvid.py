# A trained Mask2Former is trained further, with PLuG's gates at 1, 5, 20 and 100 times the model's learning rate.
# Data and backbone: configs/real/README.md
# Start: python tools/analysis_tools/study.py configs/studies/gate_rate_camvid_start.py
# Run:   python tools/analysis_tools/study.py configs/studies/gate_rate_camvid.py
runs = dict(
    vanilla='configs/real/camvid/mask2former_lite0_1xb4-150_camvid-160x128.py',
    rate_1='configs/studies/gate_rate_camvid/rate-1.py',
    rate_5='configs/studies/gate_rate_camvid/rate-5.py',
    rate_20='configs/real/camvid/plug-mask2former_lite0_1xb4-150_camvid-160x128.py',
    rate_100='configs/studies/gate_rate_camvid/rate-100.py')
seeds = [0, 1, 2]
metric = 'mIoU'
