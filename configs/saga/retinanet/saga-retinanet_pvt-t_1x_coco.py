_base_ = 'mmdet::pvt/retinanet_pvt-t_fpn_1x_coco.py'
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

# The authors have published no weights: init_cfg=None starts from scratch.
model = dict(
    backbone=dict(
        _delete_=True,
        type='mmgate.SAGAPVT',
        arch='tiny',
        drop_path_rate=0.1,
        init_cfg=None))
