_base_ = 'deformable-detr-refine_lite0_1xb4-2e_bccd.py'

model = dict(
    type='mmgate.Gated',
    host='mmdet.DeformableDETR',
    attention=dict(
        type='PLuGMultiScaleDeformableAttention',
        path=['encoder.layers.*.self_attn', 'decoder.layers.*.cross_attn']))

# gates start as the identity, and at a trained model's learning rate hardly move in so few steps
optim_wrapper = dict(
    paramwise_cfg=dict(custom_keys={'mmgate.gates': dict(lr_mult=20.0)}))
custom_hooks = [*_base_.custom_hooks, dict(type='mmgate.GateStatisticsHook', interval=73)]
