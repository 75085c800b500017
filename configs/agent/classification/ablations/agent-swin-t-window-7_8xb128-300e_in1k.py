_base_ = '../agent-swin-t_8xb128-300e_in1k.py'
# Table 3: windows of 7 x 7 that do not shift, each with agents of its own
model = dict(backbone=dict(attention=dict(window=7)))
