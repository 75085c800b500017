_base_ = '../../vanilla/upernet/upernet_swin-b_8xb2-160k_ade20k-512x512.py'
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

# From the authors' ImageNet weights as they are published.
model = dict(
    backbone=dict(
        type='mmgate.AgentSwin',
        arch='base',
        agent_nums=(81, 144, 196, 49),
        init_cfg=dict(checkpoint='https://cloud.tsinghua.edu.cn/f/4fcd2d0114bb490483c3/?dl=1')))
optim_wrapper = dict(constructor='mmgate.GateOptimWrapperConstructor')
