_base_ = '../plug-mask2former_r50_8xb2-160k_ade20k-512x512.py'
# Table 4 (D): two factors from a two-layer MLP
model = dict(attention=dict(gml='mlp'))
