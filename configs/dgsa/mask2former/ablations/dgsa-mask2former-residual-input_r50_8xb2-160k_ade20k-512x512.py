_base_ = '../dgsa-mask2former_r50_8xb2-160k_ade20k-512x512.py'
# The residual around the block, as the paper's figure draws it
model = dict(attention=dict(residual='input'))
