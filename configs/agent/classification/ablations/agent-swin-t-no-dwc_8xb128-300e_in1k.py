_base_ = '../agent-swin-t_8xb128-300e_in1k.py'
# Table 6: biases, but no depthwise convolution
model = dict(backbone=dict(attention=dict(dwc=False)))
