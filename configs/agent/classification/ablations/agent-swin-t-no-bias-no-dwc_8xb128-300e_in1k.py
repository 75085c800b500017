_base_ = '../agent-swin-t_8xb128-300e_in1k.py'
# Table 6: agent attention alone
model = dict(backbone=dict(attention=dict(bias=False, dwc=False)))
