# By DeiT's recipe. PLuG's paper trains GCViT with timm's set-up, which it does not print.
_base_ = '../../_base_/classification/imagenet_deit_8xb128-300e.py'

model = dict(
    backbone=dict(type='TIMMBackbone', model_name='gcvit_xxtiny', drop_path_rate=0.2),
    head=dict(in_channels=512))
