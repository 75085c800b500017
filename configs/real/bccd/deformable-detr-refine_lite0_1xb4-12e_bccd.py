# A small Deformable DETR on micrographs of blood, from a backbone that ImageNet trained: ../README.md has both.
_base_ = [
    '../../vanilla/deformable_detr/deformable-detr-refine_r50_8xb4-50e_coco.py',
    '../../_base_/datasets/bccd.py'
]
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

model = dict(
    num_queries=40,
    data_preprocessor=dict(mean=[127.5] * 3, std=[127.5] * 3),
    backbone=dict(
        _delete_=True,
        type='mmpretrain.TIMMBackbone',
        model_name='tf_efficientnet_lite0',
        features_only=True,
        out_indices=(2, 3, 4),
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/tf_efficientnet_lite0.pth')),
    neck=dict(in_channels=[40, 112, 320], out_channels=128),
    encoder=dict(
        num_layers=2,
        layer_cfg=dict(
            self_attn_cfg=dict(embed_dims=128),
            ffn_cfg=dict(embed_dims=128, feedforward_channels=256, ffn_drop=0.0))),
    decoder=dict(
        num_layers=2,
        layer_cfg=dict(
            self_attn_cfg=dict(embed_dims=128, dropout=0.0),
            cross_attn_cfg=dict(embed_dims=128),
            ffn_cfg=dict(embed_dims=128, feedforward_channels=256, ffn_drop=0.0))),
    positional_encoding=dict(num_feats=64),
    bbox_head=dict(num_classes=3, embed_dims=128),
    test_cfg=dict(max_per_img=40))

# the data's settings, out of the dict that the second base has them in
bccd = _base_.pop('bccd')
data_root = bccd.data_root
metainfo = bccd.metainfo
train_pipeline = bccd.train_pipeline
test_pipeline = bccd.test_pipeline
train_dataloader = bccd.train_dataloader
val_dataloader = bccd.val_dataloader
test_dataloader = val_dataloader
val_evaluator = bccd.evaluator
test_evaluator = val_evaluator
del bccd

optim_wrapper = dict(
    constructor='mmgate.GateOptimWrapperConstructor',
    optimizer=dict(lr=4e-4))
train_cfg = dict(max_epochs=12, val_interval=6)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=50),
    dict(type='MultiStepLR', begin=0, end=12, by_epoch=True, milestones=[10], gamma=0.1)
]
default_hooks = dict(
    logger=dict(interval=20), checkpoint=dict(interval=1, max_keep_ckpts=2))
auto_scale_lr = dict(base_batch_size=4)
