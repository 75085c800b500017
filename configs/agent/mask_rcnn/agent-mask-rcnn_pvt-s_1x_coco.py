_base_ = '../../vanilla/mask_rcnn/mask-rcnn_pvt-s_1x_coco.py'
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

# From the authors' ImageNet weights as they are published.
model = dict(
    backbone=dict(
        type='mmgate.AgentPVT',
        agent_nums=(144, 256, 784, 784),
        init_cfg=dict(checkpoint='https://cloud.tsinghua.edu.cn/f/36b8be9a8863456685a3/?dl=1')))
