"""Adapters that let gates into mmcv's attention modules or, without mmcv, into the modules that replace them."""

from __future__ import annotations

from mmgate.hosts.table import adapts, adapts_inside
from mmgate.layers.base.deformable import DeformableGate, GatedDeformableAttention, UnevenDeformableAttention
from mmgate.layers.base.dense import DenseGate
from mmgate.layers.base.mmcv_or_torch import MMCVMultiScaleDeformableAttention, MultiheadAttention

adapts(DeformableGate, MMCVMultiScaleDeformableAttention, UnevenDeformableAttention)(GatedDeformableAttention)
adapts_inside(DenseGate, 'attn', MultiheadAttention)
