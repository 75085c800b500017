_base_ = 'mmdet::deformable_detr/deformable-detr_r50_16xb2-50e_coco.py'
# The paper's setting: batches of 4, accumulated over 8 steps (32 images a step), and half of mmdet's weight decay.
train_dataloader = dict(batch_size=4)
optim_wrapper = dict(accumulative_counts=8, optimizer=dict(weight_decay=5e-5))
