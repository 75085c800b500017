_base_ = 'flatten-upernet_swin-t_8xb2-160k_ade20k-512x512.py'
model = dict(backbone=dict(attention=dict(type='PolaFormerAttention')))
