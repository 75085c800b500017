_base_ = '../plug-deit-s_8xb128-300e_in1k.py'
# Table 6
model = dict(attention=dict(heads='per_head'))
