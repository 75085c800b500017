_base_ = 'vanilla.py'
model = dict(
    type='mmgate.Gated',
    host='mmseg.EncoderDecoder',
    attention=dict(
        type='PLuGMultiheadAttention',
        path='decode_head.transformer_decoder.layers.*.self_attn'))
