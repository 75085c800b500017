_base_ = 'rate-20.py'
model = dict(attention=dict(path=['decoder.layers.*.cross_attn']))
