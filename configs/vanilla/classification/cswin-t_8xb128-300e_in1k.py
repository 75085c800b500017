# CSwin's recipe is Agent-CSwin's, its depths are not.
_base_ = '../../agent/classification/agent-cswin-t_8xb128-300e_in1k.py'
model = dict(backbone=dict(agent_nums=(None, ) * 4, depths=(1, 2, 21, 1)))
