_base_ = 'plug-mask2former-paper-init_r50_8xb2-160k_ade20k-512x512.py'
# Table 11. An identity start would be G = 1, which undoes what the table tests.
model = dict(attention=dict(residual=False))
