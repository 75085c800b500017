_base_ = '../../plug/mask2former/plug-mask2former_r18_1xb8-1k_shapes-128x128.py'
model = dict(attention=dict(type='DifferentialGatedMultiheadAttention'))
