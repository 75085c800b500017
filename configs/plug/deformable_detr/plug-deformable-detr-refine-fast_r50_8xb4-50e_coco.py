# The same training in less time: backbone, encoder layers and decoder compiled, float32 products in TF32. Its -bf16 twin
# is for a GPU.
_base_ = 'plug-deformable-detr-refine_r50_8xb4-50e_coco.py'
custom_hooks = [
    dict(type='mmgate.MatchOnceHook'),
    dict(type='mmgate.ChannelsLastHook'),
    dict(type='mmgate.CompileHook'),
    dict(type='mmgate.TF32Hook')]
