_base_ = '../../_base_/classification/imagenet_pvt_8xb128-300e.py'

model = dict(
    backbone=dict(
        type='mmgate.SAGAPVT', arch='large', out_indices=(3,), drop_path_rate=0.3))
optim_wrapper = dict(clip_grad=dict(max_norm=1.0))
