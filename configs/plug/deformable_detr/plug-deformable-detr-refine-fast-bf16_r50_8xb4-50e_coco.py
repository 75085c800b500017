# In bfloat16, which needs no scaled loss; coordinates and logits stay in float32.
_base_ = 'plug-deformable-detr-refine-fast_r50_8xb4-50e_coco.py'
optim_wrapper = dict(type='AmpOptimWrapper', dtype='bfloat16', loss_scale=dict(enabled=False))
custom_hooks = [
    dict(type='mmgate.MatchOnceHook'),
    dict(type='mmgate.ChannelsLastHook'),
    dict(type='mmgate.Float32Hook'),
    dict(type='mmgate.CompileHook'),
    dict(type='mmgate.TF32Hook')]
