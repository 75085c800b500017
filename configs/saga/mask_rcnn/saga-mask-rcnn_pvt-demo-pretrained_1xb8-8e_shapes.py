# Trained by make demo-pretrain: starts from a classifier that tools/train.py wrote.
_base_ = 'saga-mask-rcnn_pvt-demo_1xb8-8e_shapes.py'

model = dict(
    backbone=dict(
        init_cfg=dict(
            _delete_=True,
            type='Pretrained',
            prefix='backbone.',
            checkpoint='work_dirs/demo_pretrain/classifier/epoch_12.pth')))
