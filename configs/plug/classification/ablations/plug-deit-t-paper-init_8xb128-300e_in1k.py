_base_ = '../plug-deit-t_8xb128-300e_in1k.py'
# Every linear layer of the gate starts as DeiT's do, normal of deviation 0.02; the partner of no-residual and gml-none
model = dict(attention=dict(init='vit'))
