_base_ = '../plug-deit-t_8xb128-300e_in1k.py'
# Table 4
model = dict(attention=dict(gml='mlp'))
