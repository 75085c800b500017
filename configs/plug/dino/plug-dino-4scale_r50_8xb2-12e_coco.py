_base_ = 'mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py'
# Not in the paper; gated where its Deformable DETR is.
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)
model = dict(
    type='mmgate.Gated',
    host='mmdet.DINO',
    attention=dict(
        type='PLuGMultiScaleDeformableAttention',
        path=['encoder.layers.*.self_attn', 'decoder.layers.*.cross_attn']))
optim_wrapper = dict(constructor='mmgate.GateOptimWrapperConstructor')
