"""Import mmcv's attention classes, from which ours derive, or without mmcv their replacements in plain torch."""

from mmgate._environment import check_mmcv, without_mmengine

if not without_mmengine():
    check_mmcv()
    from mmcv.cnn.bricks.drop import build_dropout
    from mmcv.cnn.bricks.transformer import MultiheadAttention
    from mmcv.ops import MultiScaleDeformableAttention as MMCVMultiScaleDeformableAttention
else:
    from mmgate.gates.base.without_mmcv import DeformableProjections as MMCVMultiScaleDeformableAttention
    from mmgate.gates.base.without_mmcv import MultiheadAttention, build_dropout

__all__ = ['MMCVMultiScaleDeformableAttention', 'MultiheadAttention', 'build_dropout']
