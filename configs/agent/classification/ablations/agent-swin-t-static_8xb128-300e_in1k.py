_base_ = '../agent-swin-t_8xb128-300e_in1k.py'
# Table 7: learnt agents, the same for every image
model = dict(backbone=dict(attention=dict(agents='static')))
