_base_ = 'plug-deit-t_8xb128-300e_in1k.py'

model = dict(
    backbone=dict(arch='deit-small'),
    head=dict(in_channels=384))
