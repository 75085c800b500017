# Sequences 0006R0 and 0016E5, by day. The 62 images of 0001TP, at dusk, come first in the order of names.
_base_ = 'mask2former_lite0_1xb4-1k_camvid-160x128.py'

train_dataloader = dict(dataset=dict(indices=-305))
