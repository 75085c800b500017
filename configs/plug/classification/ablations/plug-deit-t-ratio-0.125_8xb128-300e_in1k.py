_base_ = '../plug-deit-t_8xb128-300e_in1k.py'
# Fig. 4
model = dict(attention=dict(ratio=0.125))
