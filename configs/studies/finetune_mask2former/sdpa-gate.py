_base_ = 'plug.py'
model = dict(attention=dict(type='SDPAGatedMultiheadAttention', init='identity', scale=2.0))
