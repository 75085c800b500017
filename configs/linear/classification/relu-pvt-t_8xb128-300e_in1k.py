_base_ = '../../vanilla/classification/pvt-t_8xb128-300e_in1k.py'
# SAGA's Fig. 1: the plain linear attention of ReLU(Q) and ReLU(K), without a depthwise convolution
model = dict(backbone=dict(attention=dict(type='EnhancedLinearAttention', dwc=0)))
