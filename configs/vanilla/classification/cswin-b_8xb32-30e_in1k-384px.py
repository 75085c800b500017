# CSwin's recipe is Agent-CSwin's, its depths are not.
_base_ = '../../agent/classification/agent-cswin-b_8xb32-30e_in1k-384px.py'
model = dict(backbone=dict(agent_nums=(None, ) * 4, depths=(2, 4, 32, 2)))
load_from = 'work_dirs/cswin-b_8xb128-300e_in1k/epoch_300.pth'
