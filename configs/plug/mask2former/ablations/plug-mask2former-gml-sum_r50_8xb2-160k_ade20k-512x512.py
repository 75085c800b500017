_base_ = '../plug-mask2former_r50_8xb2-160k_ade20k-512x512.py'
# Table 4 (B): the sum of two factors
model = dict(attention=dict(gml='sum'))
