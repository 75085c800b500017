_base_ = '../agent-swin-t_8xb128-300e_in1k.py'
# Table 8
model = dict(backbone=dict(pretrain_agent_nums=(4, 9, 49, 49)))
