_base_ = '../../real/camvid/plug-mask2former_lite0_1xb4-1k_camvid-160x128.py'
custom_hooks = [*_base_.custom_hooks, dict(type='mmgate.GateStatisticsHook', interval=100)]
