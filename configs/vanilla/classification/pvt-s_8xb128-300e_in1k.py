_base_ = 'pvt-t_8xb128-300e_in1k.py'
model = dict(backbone=dict(arch='small'))
