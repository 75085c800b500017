_base_ = 'segformer_mit-b0_1xb4-2k_camvid-160x128.py'

model = dict(
    type='mmgate.Gated',
    host='mmseg.EncoderDecoder',
    attention=dict(
        type='SDPAGatedMultiheadAttention', path='backbone.layers.*.*.*.attn'))
