_base_ = '../../real/camvid/plug-mask2former_lite0_1xb4-150_camvid-160x128.py'
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'mmgate.gates': dict(lr_mult=1.0)}))
