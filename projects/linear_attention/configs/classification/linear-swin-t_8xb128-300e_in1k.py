_base_ = '../../../../configs/agent/classification/agent-swin-t_8xb128-300e_in1k.py'
custom_imports = dict(imports=['mmgate', 'projects.linear_attention'], allow_failed_imports=False)
# Table 6: vanilla linear attention in the blocks that have agents in Agent-Swin-T
model = dict(
    backbone=dict(
        type='mmgate.LinearSwin',
        attention=dict(type='EnhancedLinearAttention', dwc=0),
        blocks=(2, 2, 6, 0)))
