_base_ = 'mmgate::plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py'

custom_imports = dict(imports=['mmgate', 'mine'], allow_failed_imports=False)
model = dict(
    backbone=dict(base_channels=8),
    neck=dict(type='PoolingMapper', in_channels=[16, 32, 64]),
    encoder=dict(num_layers=1),
    decoder=dict(num_layers=1),
    attention=[
        dict(path='neck.pooling', type='mmdet.Tempered', strength=0.5),
        dict(path='**.cross_attn', type='PLuGMultiScaleDeformableAttention'),
    ])
loader = dict(batch_size=2, num_workers=0, persistent_workers=False)
train_dataloader = loader
val_dataloader = loader
test_dataloader = loader
train_cfg = dict(max_epochs=1, val_interval=1)
default_hooks = dict(logger=dict(interval=1))
