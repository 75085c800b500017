_base_ = 'rate-20.py'
model = dict(attention=dict(path=['encoder.layers.*.self_attn']))
