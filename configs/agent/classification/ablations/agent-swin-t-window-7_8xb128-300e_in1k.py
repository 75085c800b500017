_base_ = '../agent-swin-t_8xb128-300e_in1k.py'
# Table 3: windows of 7 x 7, each with its agents; those of odd blocks are shifted, as in the authors' code
model = dict(backbone=dict(attention=dict(window=7)))
