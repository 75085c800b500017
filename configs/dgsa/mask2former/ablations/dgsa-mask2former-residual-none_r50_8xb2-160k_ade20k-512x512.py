_base_ = '../dgsa-mask2former_r50_8xb2-160k_ade20k-512x512.py'
# No residual, as for text
model = dict(attention=dict(residual='none'))
