_base_ = '../sdpa-gate-mask2former_r50_8xb2-160k_ade20k-512x512.py'
# After the output projection
model = dict(attention=dict(position='G5'))
