_base_ = '../../_base_/classification/imagenet_384px_8xb32-30e.py'

model = dict(
    backbone=dict(
        type='mmgate.AgentCSwin',
        arch='base',
        out_indices=(3,),
        pretrain_img_size=384,
        # stages 1 and 2, whose agents see the whole map, are cut in the vanilla partner
        splits=(1, 2, 12, None),
        drop_path_rate=0.7),
    head=dict(in_channels=768))
# The authors test on the centre, here as well.
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(438, 438), backend='pillow', interpolation='bicubic'),
    dict(type='CenterCrop', crop_size=384),
    dict(type='PackInputs')
]
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
# The authors' own: no warm-up, 20 epochs of cosine and 10 at its end; their ImageNet code decays the agent biases.
optim_wrapper = dict(
    constructor='mmgate.GroupedOptimWrapperConstructor',
    optimizer=dict(lr=2.5e-6))
param_scheduler = [
    dict(type='CosineAnnealingLR', eta_min=2.5e-7, by_epoch=True, end=20, convert_to_iter_based=True)
]
# The authors evaluate averaged weights, as fine-tuning starts from them.
custom_hooks = [dict(type='EMAHook', momentum=2e-4, priority='ABOVE_NORMAL')]
load_from = 'work_dirs/agent-cswin-b_8xb128-300e_in1k/epoch_300.pth'
