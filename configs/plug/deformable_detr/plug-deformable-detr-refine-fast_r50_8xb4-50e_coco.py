# The same training in less time: parameter groups merged and the optimizer fused, all layers and images matched at once,
# channels last in the backbone, backbone and encoder layers compiled. Its -bf16 twin is for a GPU.
_base_ = 'plug-deformable-detr-refine_r50_8xb4-50e_coco.py'
model = dict(bbox_head=dict(type='mmgate.MatchedOnce', host='mmdet.DeformableDETRHead'))
optim_wrapper = dict(
    constructor='mmgate.GroupedOptimWrapperConstructor',
    paramwise_cfg=dict(grouped='mmgate.GateOptimWrapperConstructor'))
custom_hooks = [dict(type='mmgate.ChannelsLastHook'), dict(type='mmgate.CompileHook')]
