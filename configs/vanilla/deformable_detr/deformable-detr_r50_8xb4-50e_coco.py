_base_ = 'mmdet::deformable_detr/deformable-detr_r50_16xb2-50e_coco.py'
# 32 images a step, as mmdet's: 8 GPUs with 4 each. The paper trained on two GPUs in batches of 4, accumulated to the same
# 32, with half of mmdet's weight decay.
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)
# mmdet's computation in fewer kernels and waits; docs/faster_training.md explains each part.
custom_hooks = [
    dict(type='mmgate.MatchOnceHook'), dict(type='mmgate.SamplingHook'), dict(type='mmgate.ChannelsLastHook')]
train_dataloader = dict(batch_size=4)
optim_wrapper = dict(
    constructor='mmgate.GroupedOptimWrapperConstructor',
    optimizer=dict(weight_decay=5e-5))
auto_scale_lr = dict(enable=False, base_batch_size=32)
