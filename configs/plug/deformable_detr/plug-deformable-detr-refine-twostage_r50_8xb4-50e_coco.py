_base_ = '../../vanilla/deformable_detr/deformable-detr-refine-twostage_r50_8xb4-50e_coco.py'
# The encoder alone: with a gated decoder the two-stage model loses AP (section 4.1).
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)
model = dict(
    type='mmgate.Gated',
    host='mmdet.DeformableDETR',
    attention=dict(
        type='PLuGMultiScaleDeformableAttention',
        path=['encoder.layers.*.self_attn']))
optim_wrapper = dict(constructor='mmgate.GateOptimWrapperConstructor')
