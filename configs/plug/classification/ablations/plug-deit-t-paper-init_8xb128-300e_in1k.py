_base_ = '../plug-deit-t_8xb128-300e_in1k.py'
model = dict(attention=dict(init='paper'))
