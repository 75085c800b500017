_base_ = '../agent-swin-t_8xb128-300e_in1k.py'
# Table 9: agents in all stages
model = dict(backbone=dict(blocks=(2, 2, 6, 2)))
