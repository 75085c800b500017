# Agent-Swin's and SAGA-Swin's partner: Swin's windows in their shell.
_base_ = '../../_base_/classification/imagenet_swin_8xb128-300e.py'
model = dict(backbone=dict(type='mmgate.Swin'))
