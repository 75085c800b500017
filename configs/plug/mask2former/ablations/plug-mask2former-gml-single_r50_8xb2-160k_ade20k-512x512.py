_base_ = '../plug-mask2former_r50_8xb2-160k_ade20k-512x512.py'
# Table 4 (C): one factor
model = dict(attention=dict(gml='single'))
