_base_ = 'mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py'
# mmdet's DINO, its deformable attention on mmgate's operator: same parameters and outputs, other speed.
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)
model = dict(
    type='mmgate.Gated',
    host='mmdet.DINO',
    attention=dict(type='MultiScaleDeformableAttention', path='**'))
custom_hooks = [dict(type='mmgate.MatchOnceHook'), dict(type='mmgate.ChannelsLastHook')]
optim_wrapper = dict(constructor='mmgate.GroupedOptimWrapperConstructor')
