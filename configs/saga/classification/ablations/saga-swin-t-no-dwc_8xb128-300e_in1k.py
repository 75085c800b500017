_base_ = '../saga-swin-t_8xb128-300e_in1k.py'
# Table 4
model = dict(backbone=dict(attention=dict(dwc=False)))
