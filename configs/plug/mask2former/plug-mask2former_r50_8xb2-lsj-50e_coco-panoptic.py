_base_ = 'mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco-panoptic.py'
# Not in the paper, which tried ADE20K alone.
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)
model = dict(
    type='mmgate.Gated',
    host='mmdet.Mask2Former',
    attention=dict(
        type='PLuGMultiheadAttention',
        path='panoptic_head.transformer_decoder.layers.*.self_attn'))
custom_hooks = [
    dict(type='mmgate.MatchOnceHook'), dict(type='mmgate.SamplingHook'), dict(type='mmgate.ChannelsLastHook')]
optim_wrapper = dict(constructor='mmgate.GateOptimWrapperConstructor')
