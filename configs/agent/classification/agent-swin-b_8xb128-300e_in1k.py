_base_ = 'agent-swin-t_8xb128-300e_in1k.py'
model = dict(backbone=dict(arch='base', drop_path_rate=0.5), head=dict(in_channels=1024))
