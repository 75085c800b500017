# mmseg's, with one wait for the device a matching.
_base_ = ['import_mmgate.py', 'mmseg::mask2former/mask2former_swin-b-in1k-384x384-pre_8xb2-160k_ade20k-640x640.py']
custom_imports = dict(imports=['mmdet.models', 'mmgate'], allow_failed_imports=False)
custom_hooks = [dict(type='mmgate.MatchOnceHook'), dict(type='mmgate.SamplingHook')]
