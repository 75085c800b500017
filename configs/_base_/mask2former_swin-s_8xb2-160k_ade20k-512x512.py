# mmseg's, with one wait for the device a matching.
_base_ = ['import_mmgate.py', 'mmseg::mask2former/mask2former_swin-s_8xb2-160k_ade20k-512x512.py']
custom_imports = dict(imports=['mmdet.models', 'mmgate'], allow_failed_imports=False)
custom_hooks = [dict(type='mmgate.MatchOnceHook'), dict(type='mmgate.SamplingHook')]
