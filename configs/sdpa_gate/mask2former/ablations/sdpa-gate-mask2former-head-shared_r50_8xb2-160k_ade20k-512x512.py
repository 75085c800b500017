_base_ = '../sdpa-gate-mask2former_r50_8xb2-160k_ade20k-512x512.py'
# The heads share their scores
model = dict(attention=dict(head_shared=True))
