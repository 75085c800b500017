# Agent attention, Fig. 7: fine-tuned for 30 epochs at 384 pixels, from 224, by the recipe of 384.
_base_ = '../../_base_/classification/imagenet_384px_8xb32-30e.py'

model = dict(
    backbone=dict(
        type='mmgate.Swin',
        arch='small',
        out_indices=(3,),
        pretrain_img_size=384,
        window_size=12,
        pad_small_map=False,
        drop_path_rate=0.3),
    head=dict(in_channels=768))
# Swin's own clipping.
optim_wrapper = dict(clip_grad=dict(max_norm=5.0))
load_from = 'work_dirs/swin-s_8xb128-300e_in1k/epoch_300.pth'
