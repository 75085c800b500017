_base_ = 'plug-gates-alone.py'
# gates start at rest: at the rate of a trained model they hardly move in 100 steps
optim_wrapper = dict(
    paramwise_cfg=dict(custom_keys={'mmgate.gates': dict(lr_mult=100.0)}))
