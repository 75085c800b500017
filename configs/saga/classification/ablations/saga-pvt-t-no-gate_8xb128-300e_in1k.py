_base_ = '../saga-pvt-t_8xb128-300e_in1k.py'
# Fig. 5
model = dict(backbone=dict(attention=dict(gate=False)))
