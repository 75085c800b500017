# Trained by make demo-backbones.
_base_ = '../../vanilla/mask_rcnn/mask-rcnn_pvt-demo_1xb8-8e_shapes.py'
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

model = dict(
    backbone=dict(
        _delete_=True,
        type='mmgate.SAGASwin',
        pretrain_img_size=128,
        embed_dims=32,
        depths=(2, 2, 2, 1),
        num_heads=(1, 2, 4, 8),
        blocks=(2, 2, 2, 0),
        drop_path_rate=0.0))
optim_wrapper = dict(constructor='mmgate.GateOptimWrapperConstructor')
