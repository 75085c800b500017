_base_ = 'plug-mask2former-paper-init_r50_8xb2-160k_ade20k-512x512.py'
# Table 4 (A): the activated product alone; it has no identity start
model = dict(attention=dict(gml='none'))
