_base_ = '../../_base_/classification/imagenet_384px_8xb32-30e.py'

# Table 1 has as many parameters as at 224 x 224: the position encodings keep their shapes and are resized in every pass. Our
# copy of the paper lacks its settings; the recipe is Agent-Swin-B's.
model = dict(
    backbone=dict(
        type='mmgate.SAGASwin',
        arch='base',
        out_indices=(3,),
        window_size=12,
        pad_small_map=False,
        drop_path_rate=0.5),
    head=dict(in_channels=1024))
# Swin's own clipping.
optim_wrapper = dict(clip_grad=dict(max_norm=5.0))
load_from = 'work_dirs/saga-swin-b_8xb128-300e_in1k/epoch_300.pth'
