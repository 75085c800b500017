_base_ = 'mask2former_lite0_1xb4-150_camvid-160x128.py'

model = dict(
    type='mmgate.Gated',
    host='mmseg.EncoderDecoder',
    attention=dict(
        type='PLuGMultiheadAttention',
        path='decode_head.transformer_decoder.layers.*.self_attn'))

# gates start as the identity, and at a trained model's learning rate hardly move in so few steps
optim_wrapper = dict(
    paramwise_cfg=dict(custom_keys={'mmgate.gates': dict(lr_mult=20.0)}))
custom_hooks = [*_base_.custom_hooks, dict(type='mmgate.GateStatisticsHook', interval=75)]
