_base_ = '../sdpa-gate-mask2former_r50_8xb2-160k_ade20k-512x512.py'
# The non-sparse sigmoid, from 0.5 on, instead of the sigmoid
model = dict(attention=dict(act='ns_sigmoid'))
