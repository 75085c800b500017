_base_ = 'semantic-fpn_pvt-t_8xb2-40k_ade20k-512x512.py'

model = dict(
    backbone=dict(
        num_layers=[3, 4, 18, 3],
        drop_path_rate=0.2,
        init_cfg=dict(
            checkpoint='https://github.com/whai362/PVT/releases/download/v2/pvt_medium.pth')))
