# BCCD's model and data, for tests on parts of a set: the truth comes with each image, not from a file of all.
_base_ = '../../real/bccd/deformable-detr-refine_lite0_1xb4-12e_bccd.py'

test_pipeline = _base_.test_pipeline
test_pipeline[-1].meta_keys = (*test_pipeline[-1].meta_keys, 'instances')
test_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_evaluator = dict(ann_file=None)
