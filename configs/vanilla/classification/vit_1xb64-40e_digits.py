_base_ = '../../dgsa/classification/dgvit_1xb64-40e_digits.py'
# The vanilla ViT of the same sizes
model = dict(
    backbone=dict(
        _delete_=True,
        type='mmpretrain.VisionTransformer',
        arch=dict(embed_dims=64, num_layers=4, num_heads=4, feedforward_channels=256),
        img_size=32,
        patch_size=8,
        drop_rate=0.05))
