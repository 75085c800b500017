_base_ = 'mask2former_lite0_1xb4-1k_camvid-160x128.py'

model = dict(
    type='mmgate.Gated',
    host='mmseg.EncoderDecoder',
    attention=dict(
        type='PLuGMultiheadAttention',
        path='decode_head.transformer_decoder.layers.*.self_attn'))
