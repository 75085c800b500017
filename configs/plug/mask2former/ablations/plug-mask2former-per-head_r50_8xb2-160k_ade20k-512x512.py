_base_ = '../plug-mask2former_r50_8xb2-160k_ade20k-512x512.py'
# Table 6: head-specific gates
model = dict(attention=dict(heads='per_head'))
