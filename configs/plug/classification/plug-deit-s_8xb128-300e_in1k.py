# By DeiT's recipe. The paper trains DeiT-S with timm's set-up, which it does not print.
_base_ = 'plug-deit-t_8xb128-300e_in1k.py'

model = dict(
    backbone=dict(arch='deit-small'),
    head=dict(in_channels=384))
