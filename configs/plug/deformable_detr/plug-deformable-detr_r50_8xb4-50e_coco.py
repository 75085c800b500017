_base_ = '../../vanilla/deformable_detr/deformable-detr_r50_8xb4-50e_coco.py'
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)
model = dict(
    type='mmgate.Gated',
    host='mmdet.DeformableDETR',
    attention=dict(
        type='PLuGMultiScaleDeformableAttention',
        path=['encoder.layers.*.self_attn', 'decoder.layers.*.cross_attn']))
optim_wrapper = dict(constructor='mmgate.GateOptimWrapperConstructor')
