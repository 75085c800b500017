# With 4, 8, 16 and 32 heads, as Swin-B and the authors' file; the paper's Table 21 prints 3, 6, 12 and 24.
_base_ = 'agent-swin-t_8xb128-300e_in1k.py'
model = dict(backbone=dict(arch='base', drop_path_rate=0.5), head=dict(in_channels=1024))
