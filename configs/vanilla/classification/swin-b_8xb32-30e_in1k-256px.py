# Agent attention, Fig. 7: fine-tuned for 30 epochs at 256 pixels, from 224, by the recipe of 384.
_base_ = 'swin-s_8xb32-30e_in1k-256px.py'

model = dict(backbone=dict(arch='base', drop_path_rate=0.5), head=dict(in_channels=1024))
load_from = 'work_dirs/swin-b_8xb128-300e_in1k/epoch_300.pth'
