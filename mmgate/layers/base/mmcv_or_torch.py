"""Classes of mmcv from which ours derive or, without mmcv, modules in torch alone with the same parameters."""

from mmgate._environment import available

if available('mmcv'):
    from mmcv.cnn.bricks.drop import build_dropout
    from mmcv.cnn.bricks.transformer import MultiheadAttention
    from mmcv.ops import MultiScaleDeformableAttention as MMCVMultiScaleDeformableAttention
else:
    from mmgate.layers.base.without_mmcv import DeformableProjections as MMCVMultiScaleDeformableAttention
    from mmgate.layers.base.without_mmcv import MultiheadAttention, build_dropout

__all__ = ['MMCVMultiScaleDeformableAttention', 'MultiheadAttention', 'build_dropout']
