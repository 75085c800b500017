"""mmcv's classes that ours derive from, or the same modules in torch alone where there is no mmcv."""

from mmgate._environment import available

if available('mmcv'):
    from mmcv.cnn.bricks.drop import build_dropout
    from mmcv.cnn.bricks.transformer import MultiheadAttention
    from mmcv.ops import MultiScaleDeformableAttention as MMCVMultiScaleDeformableAttention
else:
    from mmgate.layers.base.without_mmcv import DeformableShell as MMCVMultiScaleDeformableAttention
    from mmgate.layers.base.without_mmcv import MultiheadShell as MultiheadAttention
    from mmgate.layers.base.without_mmcv import build_dropout

__all__ = ['MMCVMultiScaleDeformableAttention', 'MultiheadAttention', 'build_dropout']
