# The segmentation demo: a small model from scratch on the generated shapes, on the CPU.
_base_ = '../../_base_/mask2former_r18_1xb8-1k_shapes-128x128.py'
model = dict(
    type='mmgate.Gated',
    host='mmseg.EncoderDecoder',
    attention=dict(
        type='PLuGMultiheadAttention',
        path='decode_head.transformer_decoder.layers.*.self_attn'))
optim_wrapper = dict(constructor='mmgate.GateOptimWrapperConstructor')
