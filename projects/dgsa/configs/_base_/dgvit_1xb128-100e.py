custom_imports = dict(imports=['mmgate', 'projects.dgsa'], allow_failed_imports=False)

# M-DGSA, Table 3. The dropout is that of every layer; position embeddings are as long as the image has patches.
model = dict(
    _scope_='mmpretrain',  # also where a file of another project inherits this one
    type='mmpretrain.ImageClassifier',
    data_preprocessor=dict(type='mmpretrain.ClsDataPreprocessor', to_rgb=False),
    backbone=dict(type='mmgate.DGViT', img_size=32, drop_rate=0.05),
    neck=None,
    # A hidden layer of 128 in the head: with it Table 5's sizes come out, the paper does not mention it.
    head=dict(
        type='mmpretrain.VisionTransformerClsHead',
        num_classes=10,
        in_channels=256,
        hidden_dim=128,
        loss=dict(type='mmpretrain.CrossEntropyLoss', loss_weight=1.0),
        topk=(1, )))

optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=3e-4, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-8),
    constructor='mmgate.GateOptimWrapperConstructor')
param_scheduler = dict(type='CosineAnnealingLR', T_max=100, by_epoch=True, begin=0, end=100)
train_cfg = dict(by_epoch=True, max_epochs=100, val_interval=1)
val_cfg = dict()
test_cfg = dict()
auto_scale_lr = dict(enable=False, base_batch_size=128)

# Section 5.1: noise on the training images, in the `noise` configs; kinds and levels are ours, the paper names none.
noise = dict(
    type='mmgate.RandomNoise',
    kinds=('gaussian', 'salt_and_pepper', 'speckle'),
    levels=(0.05, 0.1, 0.2))
