_base_ = '../../_base_/classification/gated-deit-t_8xb128-300e.py'
model = dict(attention=dict(type='PolaFormerAttention'))
