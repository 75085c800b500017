_base_ = '../../vanilla/semantic_fpn/semantic-fpn_pvt-t_8xb2-40k_ade20k-512x512.py'
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

# The authors have published no weights: init_cfg=None starts from scratch.
model = dict(
    backbone=dict(
        _delete_=True,
        type='mmgate.SAGAPVT',
        arch='tiny',
        drop_path_rate=0.1,
        init_cfg=None))
