_base_ = '../plug-mask2former_r50_8xb2-160k_ade20k-512x512.py'
# Table 5
model = dict(attention=dict(activation='hardtanh'))
