# A small DGViT on real images that need no download: scikit-learn's digits. The sizes and the schedule are ours.
_base_ = [
    '../../../configs/vanilla/classification/vit_1xb64-40e_digits.py',
    '_base_/digits_noise.py'
]
custom_imports = dict(imports=['mmgate', 'projects.dgsa'], allow_failed_imports=False)

model = dict(
    backbone=dict(
        _delete_=True,
        type='mmgate.DGViT',
        embed_dims=64,
        num_layers=4,
        num_heads=4,
        img_size=32,
        patch_size=8,
        drop_rate=0.05))
