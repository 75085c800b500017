_base_ = 'deformable-detr-refine_lite0_1xb4-12e_facemask.py'

model = dict(
    type='mmgate.Gated',
    host='mmdet.DeformableDETR',
    attention=dict(
        type='PLuGMultiScaleDeformableAttention',
        path=['encoder.layers.*.self_attn', 'decoder.layers.*.cross_attn']))
custom_hooks = [*_base_.custom_hooks, dict(type='mmgate.GateStatisticsHook', interval=170)]
