_base_ = 'retinanet_pvt-demo_1xb4-12e_bccd.py'

model = dict(backbone=dict(type='mmgate.SAGAPVT'))
