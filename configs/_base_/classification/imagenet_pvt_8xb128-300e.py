_base_ = 'imagenet_8xb128-300e.py'

# PVT's own 5 epochs of warm-up.
param_scheduler = _base_.param_scheduler
param_scheduler[0].end = param_scheduler[1].begin = 5

# PVT's own start: every linear layer from a normal distribution of deviation 0.02.
model = dict(backbone=dict(init='paper'))
