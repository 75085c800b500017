# Trains the Mask2Former from whose checkpoint gate_rate_camvid.py starts.
# Data and backbone: configs/real/README.md
runs = dict(vanilla='configs/real/camvid/mask2former_lite0_1xb4-1k_camvid-160x128.py')
seeds = [0]
metric = 'mIoU'
