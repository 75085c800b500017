_base_ = '../../_base_/classification/imagenet_swin_8xb128-300e.py'
model = dict(backbone=dict(type='mmgate.SAGASwin', arch='base', drop_path_rate=0.5), head=dict(in_channels=1024))
