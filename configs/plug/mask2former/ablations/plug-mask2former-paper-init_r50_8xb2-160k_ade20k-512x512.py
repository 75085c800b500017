_base_ = '../plug-mask2former_r50_8xb2-160k_ade20k-512x512.py'
# the gate starts as detectors start linear layers, not as the identity; the partner of no-residual and gml-none
model = dict(attention=dict(init='paper'))
