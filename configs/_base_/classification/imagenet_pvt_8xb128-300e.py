# 300 epochs are the paper's; the authors' files add 10 at the least rate: `--cfg-options train_cfg.max_epochs=310`.
_base_ = 'imagenet_8xb128-300e.py'

# PVT's own 5 epochs of warm-up, as in these files; Agent attention's paper prints 20. From 2e-6 and down to 2e-5, twice
# the 1e-6 and 1e-5 that the files have for 512 images.
param_scheduler = _base_.param_scheduler
param_scheduler[0].end = param_scheduler[1].begin = 5
param_scheduler[0].start_factor = 2e-3
param_scheduler[1].eta_min, param_scheduler[1].end = 2e-5, 300

# PVT's own start: every linear layer from a normal distribution of deviation 0.02.
model = dict(backbone=dict(init='paper'))
