_base_ = '../../vanilla/dino/ungated-dino-4scale_r50_8xb2-12e_coco.py'
# Not in the paper; gated where its Deformable DETR is.
model = dict(
    attention=dict(
        type='PLuGMultiScaleDeformableAttention',
        path=['encoder.layers.*.self_attn', 'decoder.layers.*.cross_attn']))
optim_wrapper = dict(constructor='mmgate.GateOptimWrapperConstructor')
