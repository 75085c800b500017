_base_ = 'mmdet::grounding_dino/grounding_dino_swin-t_finetune_16xb2_1x_coco.py'
# Not in the paper. The identity start lets the published checkpoint, which this fine-tunes, begin as it is.
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)
model = dict(
    type='mmgate.Gated',
    host='mmdet.GroundingDINO',
    attention=[
        dict(
            type='PLuGMultiScaleDeformableAttention',
            path=['encoder.layers.*.self_attn', 'decoder.layers.*.cross_attn']),
        dict(type='PLuGMultiheadAttention', path='encoder.fusion_layers.*.attn')])
custom_hooks = [dict(type='mmgate.MatchOnceHook')]
optim_wrapper = dict(constructor='mmgate.GateOptimWrapperConstructor')
