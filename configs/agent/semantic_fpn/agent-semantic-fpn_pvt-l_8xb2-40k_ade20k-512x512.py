_base_ = '../../vanilla/semantic_fpn/semantic-fpn_pvt-l_8xb2-40k_ade20k-512x512.py'
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

# From the authors' ImageNet weights as they are published.
model = dict(
    backbone=dict(
        type='mmgate.AgentPVT',
        agent_nums=(144, 256, 784, 784),
        init_cfg=dict(checkpoint='https://cloud.tsinghua.edu.cn/f/040cfe0cfbbe4762ad09/?dl=1')))
