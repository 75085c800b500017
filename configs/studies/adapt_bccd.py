# A Deformable DETR trained on faces goes on with blood cells, whose classes are others: the head of classes and boxes
# trains in every row, and with it nothing, gates alone, other small parts, or everything.
# Data and backbone: configs/real/README.md
# Start: python tools/train.py configs/real/facemask/deformable-detr-refine_lite0_1xb4-12e_facemask.py
# Run:   python tools/analysis_tools/compare_adapters.py configs/studies/adapt_bccd.py
config = 'configs/studies/adapt_bccd/model.py'
checkpoint = 'work_dirs/deformable-detr-refine_lite0_1xb4-12e_facemask/epoch_12.pth'

plug = [
    dict(
        type='PLuGMultiScaleDeformableAttention',
        path=['encoder.layers.*.self_attn', 'decoder.layers.*.cross_attn'])
]
attention = r'(encoder|decoder)\..*(self_attn|cross_attn)\.'
head = r'bbox_head\.'

parts = dict(
    everything=dict(trains=['.*'], statistics=True),
    head=dict(trains=[head]),
    plug=dict(attention=plug, trains=['gates', head]),
    norms=dict(trains=['norms', head]),
    low_rank=dict(low_rank=dict(pattern=attention, rank=8), trains=['low_rank', head]))
# learning rates: 5 and 20 times 4e-4, at which the model was trained; everything at 1 and 2.5 times that
rates = dict(default=[2e-3, 8e-3], everything=[4e-4, 1e-3])
steps = 60

# 292 images for training, of which the last 46 choose the rates
sweep = dict(
    train=dict(indices=list(range(246))),
    test=dict(ann_file='annotations/train.json', indices=list(range(246, 292))))
train = {'292 images': dict(indices=292)}
tests = dict(blood=dict())
seeds = [0, 1, 2]
metric = 'coco/bbox_mAP'
del attention, head, plug
