_base_ = '../../_base_/classification/imagenet_deit_8xb128-300e.py'

model = dict(
    backbone=dict(type='TIMMBackbone', model_name='visformer_tiny', drop_path_rate=0.03),
    head=dict(in_channels=384))
