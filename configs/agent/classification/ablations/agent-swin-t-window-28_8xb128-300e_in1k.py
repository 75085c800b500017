_base_ = '../agent-swin-t_8xb128-300e_in1k.py'
# Table 3: windows of 28 x 28, shifted in odd blocks
model = dict(backbone=dict(attention=dict(window=28)))
