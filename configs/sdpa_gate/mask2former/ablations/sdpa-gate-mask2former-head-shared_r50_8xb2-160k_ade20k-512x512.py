_base_ = '../sdpa-gate-mask2former_r50_8xb2-160k_ade20k-512x512.py'
# All heads take the mean of their scores, as in the paper: as many parameters as without sharing
model = dict(attention=dict(head_shared='average'))
