_base_ = '../plug-mask2former_r50_8xb2-160k_ade20k-512x512.py'
# Table 11; tanh does not reach the G = 1 of an identity start
model = dict(attention=dict(residual=False, init='paper'))
