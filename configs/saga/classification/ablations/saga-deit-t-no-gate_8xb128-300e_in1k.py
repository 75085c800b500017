_base_ = '../saga-deit-t_8xb128-300e_in1k.py'
# Fig. 5
model = dict(attention=dict(gate=False))
