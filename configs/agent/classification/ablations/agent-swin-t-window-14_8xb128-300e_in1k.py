_base_ = '../agent-swin-t_8xb128-300e_in1k.py'
# Table 3: windows of 14 x 14, shifted in odd blocks
model = dict(backbone=dict(attention=dict(window=14)))
