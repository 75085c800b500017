# A Mask2Former trained by day is adapted to dusk: everything, gates alone, and other small parts. It is tested on both.
# Data and backbone: configs/real/README.md
# Start: python tools/train.py configs/real/camvid/mask2former_lite0_1xb4-1k_camvid-day-160x128.py
# Run:   python tools/analysis_tools/compare_adapters.py configs/studies/adapt_camvid.py
config = 'configs/real/camvid/mask2former_lite0_1xb4-1k_camvid-day-160x128.py'
checkpoint = 'work_dirs/mask2former_lite0_1xb4-1k_camvid-day-160x128/iter_1000.pth'

decoder = ['decode_head.transformer_decoder.layers.*.self_attn', 'decode_head.transformer_decoder.layers.*.cross_attn']
plug = [
    dict(
        type='PLuGMultiScaleDeformableAttention',
        path='decode_head.pixel_decoder.encoder.layers.*.self_attn'),
    dict(type='PLuGMultiheadAttention', path=decoder)
]
sdpa = [dict(type='SDPAGatedMultiheadAttention', path=decoder, init='identity', act='silu')]
attention = r'decode_head\..*(self_attn|cross_attn)\.'
heads = r'decode_head\.(cls_embed|mask_embed)\.'

parts = dict(
    everything=dict(trains=['.*'], statistics=True),
    plug=dict(attention=plug, trains=['gates']),
    sdpa=dict(attention=sdpa, trains=['gates']),
    plug_and_norms=dict(attention=plug, trains=['gates', 'norms']),
    norms=dict(trains=['norms']),
    low_rank=dict(low_rank=dict(pattern=attention, rank=8), trains=['low_rank']),
    heads=dict(trains=[heads]),
    plug_and_attention=dict(attention=plug, trains=['gates', attention]),
    attention=dict(trains=[attention]),
    statistics=dict(trains=[], statistics=True))
# learning rates: 1, 5, 20 and 100 times 2e-4, half of the 4e-4 at which the model was trained
rates = dict(
    default=[2e-4, 1e-3, 4e-3, 2e-2],
    everything=[1e-4, 2e-4, 4e-4, 1e-3],
    attention=[1e-4, 2e-4, 4e-4, 1e-3],
    plug_and_attention=[1e-4, 2e-4, 4e-4, 1e-3],
    statistics=[0.0])
steps = 60

# images in the order of names: 62 at dusk, then the day
dusk = dict(img_path='images/test', seg_map_path='labels/test')
sweep = dict(
    train=dict(indices=list(range(46))),
    test=dict(
        data_prefix=dict(img_path='images/train', seg_map_path='labels/train'),
        indices=list(range(46, 62))))
train = {'62 images': dict(indices=62), '8 images': dict(indices=list(range(0, 62, 8)))}
tests = dict(dusk=dict(data_prefix=dusk), day=dict())
seeds = [0, 1, 2]
metric = 'mIoU'
del attention, decoder, dusk, heads, plug, sdpa
