# Trains the model of deformable-detr-refine_lite0_1xb4-12e_facemask.py for 340 more steps.
_base_ = 'deformable-detr-refine_lite0_1xb4-12e_facemask.py'

load_from = 'work_dirs/deformable-detr-refine_lite0_1xb4-12e_facemask/epoch_12.pth'
optim_wrapper = dict(optimizer=dict(lr=2e-4))
train_cfg = dict(max_epochs=2, val_interval=2)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=20),
    dict(type='MultiStepLR', by_epoch=False, begin=0, end=340, milestones=[255], gamma=0.1)
]
