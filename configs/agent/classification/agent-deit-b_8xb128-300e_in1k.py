_base_ = 'agent-deit-t_8xb128-300e_in1k.py'

# Agents in the first four blocks alone.
model = dict(
    attention=dict(
        path=[f'backbone.layers.{i}.attn' for i in range(4)], agent_num=81),
    backbone=dict(arch='deit-base', drop_path_rate=0.3),
    head=dict(in_channels=768))
