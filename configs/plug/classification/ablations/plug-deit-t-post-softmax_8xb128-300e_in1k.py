_base_ = '../plug-deit-t_8xb128-300e_in1k.py'
# Table 10
model = dict(attention=dict(position='post_softmax'))
