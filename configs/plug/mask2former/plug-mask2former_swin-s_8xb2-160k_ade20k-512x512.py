_base_ = '../../_base_/mask2former_swin-s_8xb2-160k_ade20k-512x512.py'
model = dict(
    type='mmgate.Gated',
    host='mmseg.EncoderDecoder',
    attention=dict(
        type='PLuGMultiheadAttention',
        path='decode_head.transformer_decoder.layers.*.self_attn'))
optim_wrapper = dict(constructor='mmgate.GateOptimWrapperConstructor')
