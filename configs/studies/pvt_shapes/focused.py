_base_ = 'softmax-reduced.py'
model = dict(backbone=dict(attention=dict(type='FocusedLinearAttention')))
