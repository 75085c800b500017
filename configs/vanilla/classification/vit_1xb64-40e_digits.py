# A small ViT on real images that need no download: scikit-learn's digits. The sizes and the schedule are ours.
_base_ = ['../../_base_/classification/digits.py', 'mmpretrain::_base_/default_runtime.py']
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

model = dict(
    _scope_='mmpretrain',  # also where a file of another project inherits this one
    type='mmpretrain.ImageClassifier',
    data_preprocessor=dict(
        type='mmpretrain.ClsDataPreprocessor',
        num_classes=10,
        mean=[79.7, 79.7, 79.7],
        std=[90.8, 90.8, 90.8],
        to_rgb=False),
    backbone=dict(
        type='mmpretrain.VisionTransformer',
        arch=dict(embed_dims=64, num_layers=4, num_heads=4, feedforward_channels=256),
        img_size=32,
        patch_size=8,
        drop_rate=0.05),
    neck=None,
    head=dict(
        type='mmpretrain.VisionTransformerClsHead',
        num_classes=10,
        in_channels=64,
        hidden_dim=128,
        loss=dict(type='mmpretrain.CrossEntropyLoss', loss_weight=1.0),
        topk=(1, )))
optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-8),
    constructor='mmgate.GateOptimWrapperConstructor')
param_scheduler = [
    dict(type='LinearLR', start_factor=0.05, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', by_epoch=True, begin=0, end=40, T_max=40, convert_to_iter_based=True)
]
train_cfg = dict(by_epoch=True, max_epochs=40, val_interval=10)
val_cfg = dict()
test_cfg = dict()
default_hooks = dict(logger=dict(interval=10), checkpoint=dict(interval=10, max_keep_ckpts=1))
auto_scale_lr = dict(enable=False, base_batch_size=64)
