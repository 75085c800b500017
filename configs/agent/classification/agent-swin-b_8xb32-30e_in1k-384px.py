_base_ = '../../_base_/classification/imagenet_384px_8xb32-30e.py'

model = dict(
    backbone=dict(
        type='mmgate.AgentSwin',
        arch='base',
        out_indices=(3,),
        pretrain_img_size=384,
        window_size=12,
        pad_small_map=False,
        drop_path_rate=0.5),
    head=dict(in_channels=1024))
# Swin's own clipping; the authors' ImageNet code decays the agent biases.
optim_wrapper = dict(
    constructor='DefaultOptimWrapperConstructor',
    clip_grad=dict(max_norm=5.0))
load_from = 'work_dirs/agent-swin-b_8xb128-300e_in1k/epoch_300.pth'
