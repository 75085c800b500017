_base_ = 'vanilla.py'
model = dict(
    type='mmgate.Gated',
    host='mmdet.DeformableDETR',
    attention=dict(
        type='PLuGMultiScaleDeformableAttention',
        path=['encoder.layers.*.self_attn', 'decoder.layers.*.cross_attn']))
