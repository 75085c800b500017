# The cropped digits, data/svhn/train_32x32.mat and test_32x32.mat.
pipeline = [dict(type='PackInputs')]
train_dataloader = dict(
    batch_size=128,
    num_workers=2,
    dataset=dict(type='mmgate.SVHN', data_root='data/svhn', split='train', pipeline=pipeline),
    sampler=dict(type='DefaultSampler', shuffle=True))
val_dataloader = dict(
    batch_size=128,
    num_workers=2,
    dataset=dict(type='mmgate.SVHN', data_root='data/svhn', split='test', pipeline=pipeline),
    sampler=dict(type='DefaultSampler', shuffle=False))
val_evaluator = dict(type='Accuracy', topk=(1, ))
test_dataloader = val_dataloader
test_evaluator = val_evaluator
