_base_ = 'flatten-semantic-fpn_pvt-t_8xb2-40k_ade20k-512x512.py'
model = dict(backbone=dict(attention=dict(type='PolaFormerAttention')))
