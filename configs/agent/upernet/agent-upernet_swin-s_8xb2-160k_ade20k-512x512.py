_base_ = [
    '../../_base_/import_mmgate.py',
    'mmseg::swin/swin-small-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512.py'
]
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

# From the authors' ImageNet weights as they are published.
model = dict(
    backbone=dict(
        type='mmgate.AgentSwin',
        arch='small',
        agent_nums=(81, 144, 196, 49),
        init_cfg=dict(checkpoint='https://cloud.tsinghua.edu.cn/f/f607172c9fea4d6e99bb/?dl=1')))
optim_wrapper = dict(constructor='mmgate.GateOptimWrapperConstructor')
auto_scale_lr = dict(enable=False, base_batch_size=16)
