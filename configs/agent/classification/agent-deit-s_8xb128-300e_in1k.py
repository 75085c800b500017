_base_ = 'agent-deit-t_8xb128-300e_in1k.py'

model = dict(
    backbone=dict(arch='deit-small', drop_path_rate=0.1),
    head=dict(in_channels=384))
