_base_ = '../plug-mask2former_r50_8xb2-160k_ade20k-512x512.py'
# Fig. 4: gates half as wide as the heads
model = dict(attention=dict(ratio=0.5))
