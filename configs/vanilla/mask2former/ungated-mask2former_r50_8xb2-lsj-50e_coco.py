_base_ = 'mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco.py'
# mmdet's Mask2Former, its pixel decoder's attention on mmgate's operator: same parameters and outputs, other speed.
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)
model = dict(
    type='mmgate.Gated',
    host='mmdet.Mask2Former',
    attention=dict(type='MultiScaleDeformableAttention', path='**'))
custom_hooks = [dict(type='mmgate.MatchOnceHook'), dict(type='mmgate.ChannelsLastHook')]
optim_wrapper = dict(constructor='mmgate.GroupedOptimWrapperConstructor')
