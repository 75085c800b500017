_base_ = '../agent-swin-t_8xb128-300e_in1k.py'
# Table 9: agents in stage 1
model = dict(backbone=dict(blocks=(2, 0, 0, 0)))
