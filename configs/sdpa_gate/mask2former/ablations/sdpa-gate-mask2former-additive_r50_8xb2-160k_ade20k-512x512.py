_base_ = '../sdpa-gate-mask2former_r50_8xb2-160k_ade20k-512x512.py'
# Added, not multiplied
model = dict(attention=dict(form='additive', act='silu'))
