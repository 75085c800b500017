_base_ = 'plug-gates-alone.py'
# gates start as the identity, and at a trained model's learning rate hardly move in 100 steps
optim_wrapper = dict(
    paramwise_cfg=dict(custom_keys={'mmgate.gates': dict(lr_mult=100.0)}))
