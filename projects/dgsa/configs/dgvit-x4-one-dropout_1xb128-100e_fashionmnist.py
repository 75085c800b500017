_base_ = 'dgvit_1xb128-100e_fashionmnist.py'
# Table 1: one dropout in the feed-forward network
model = dict(backbone=dict(ffn_dropouts=1))
