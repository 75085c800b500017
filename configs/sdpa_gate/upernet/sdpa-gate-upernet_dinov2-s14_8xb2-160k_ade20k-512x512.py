_base_ = [
    '../../_base_/import_mmgate.py',
    'mmseg::vit/vit_vit-b16_mln_upernet_8xb2-160k_ade20k-512x512.py',
]
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)

# DINOv2's ViT-S of timm, whose patches of 14 pixels do not divide the crops: timm pads them.
model = dict(
    type='mmgate.Gated',
    host='mmseg.EncoderDecoder',
    pretrained=None,
    backbone=dict(
        _delete_=True,
        type='TIMMBackbone',
        model_name='vit_small_patch14_dinov2',
        pretrained=True,
        out_indices=(2, 5, 8, 11),
        dynamic_img_size=True,
        dynamic_img_pad=True),
    neck=dict(in_channels=[384, 384, 384, 384], out_channels=384),
    decode_head=dict(in_channels=[384, 384, 384, 384]),
    auxiliary_head=dict(in_channels=384),
    attention=dict(
        type='SDPAGatedMultiheadAttention', path='backbone.timm_model.model.blocks.*.attn', init='identity', act='silu'))
optim_wrapper = dict(constructor='mmgate.GateOptimWrapperConstructor')
auto_scale_lr = dict(enable=False, base_batch_size=16)
