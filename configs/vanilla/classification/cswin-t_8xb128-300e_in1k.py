# CSwin's recipe is Agent-CSwin's.
_base_ = '../../agent/classification/agent-cswin-t_8xb128-300e_in1k.py'
model = dict(backbone=dict(agent_nums=(None, ) * 4))
