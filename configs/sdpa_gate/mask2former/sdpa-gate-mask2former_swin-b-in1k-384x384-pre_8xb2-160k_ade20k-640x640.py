_base_ = '../../_base_/mask2former_swin-b-in1k-384x384-pre_8xb2-160k_ade20k-640x640.py'
model = dict(
    type='mmgate.Gated',
    host='mmseg.EncoderDecoder',
    attention=dict(
        type='SDPAGatedMultiheadAttention',
        path='decode_head.transformer_decoder.layers.*.self_attn'))
optim_wrapper = dict(constructor='mmgate.GateOptimWrapperConstructor')
