# The demo: a small model from scratch on the generated shapes, on the CPU.
_base_ = '../../_base_/deformable-detr-refine_r18_1xb8-12e_shapes.py'
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)
model = dict(
    type='mmgate.Gated',
    host='mmdet.DeformableDETR',
    attention=dict(
        type='PLuGMultiScaleDeformableAttention',
        path=['encoder.layers.*.self_attn', 'decoder.layers.*.cross_attn']))
optim_wrapper = dict(constructor='mmgate.GateOptimWrapperConstructor')
