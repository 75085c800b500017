_base_ = '../../vanilla/classification/pvt-t_8xb128-300e_in1k.py'
model = dict(backbone=dict(attention=dict(type='FocusedLinearAttention')))
