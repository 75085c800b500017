_base_ = '../plug-deit-t_8xb128-300e_in1k.py'
# Table 5
model = dict(attention=dict(activation='none'))
