_base_ = 'mmseg::swin/swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512.py'
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

# The authors have published no weights: init_cfg=None starts from scratch.
model = dict(
    backbone=dict(
        _delete_=True,
        type='mmgate.SAGASwin',
        arch='tiny',
        drop_path_rate=0.3,
        init_cfg=None))
optim_wrapper = dict(
    paramwise_cfg=dict(
        custom_keys=dict(position_encoding=dict(decay_mult=0.))))
