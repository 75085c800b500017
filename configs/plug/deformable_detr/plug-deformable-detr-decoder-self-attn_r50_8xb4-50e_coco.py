_base_ = '../../vanilla/deformable_detr/deformable-detr_r50_8xb4-50e_coco.py'
# Table 7: the decoder's self-attention alone, which lowers AP in the paper.
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)
model = dict(
    type='mmgate.Gated',
    host='mmdet.DeformableDETR',
    attention=dict(
        type='PLuGMultiheadAttention',
        path='decoder.layers.*.self_attn'))
optim_wrapper = dict(constructor='mmgate.GateOptimWrapperConstructor')
