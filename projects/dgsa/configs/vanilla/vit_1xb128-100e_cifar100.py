_base_ = '../dgvit_1xb128-100e_cifar100.py'
# Table 1: the vanilla ViT of the same sizes
model = dict(
    backbone=dict(
        _delete_=True,
        type='mmpretrain.VisionTransformer',
        arch=dict(embed_dims=256, num_layers=8, num_heads=8, feedforward_channels=1024),
        img_size=32,
        patch_size=4,
        drop_rate=0.05))
