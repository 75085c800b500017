_base_ = 'plug.py'
# the gates' parameters train, nothing else
optim_wrapper = dict(
    paramwise_cfg=dict(
        _delete_=True,
        custom_keys={
            '': dict(lr_mult=0.0),
            'gate_q_proj': dict(lr_mult=1.0),
            'gate_k_proj': dict(lr_mult=1.0),
            'gml': dict(lr_mult=1.0)}))
