_base_ = '../../_base_/classification/imagenet_swin_8xb128-300e.py'
model = dict(backbone=dict(type='mmgate.SAGASwin', arch='small', drop_path_rate=0.3))
