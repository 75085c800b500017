"""Adapters that let gates into mmcv's attention modules or, without mmcv, into the modules that replace them."""

from __future__ import annotations

from mmgate.gates.base.deformable import DeformableAttentionAdapter, DeformableGate, UnevenDeformableAttention
from mmgate.gates.base.dense import DenseGate
from mmgate.gates.base.mmcv_or_torch import MMCVMultiScaleDeformableAttention, MultiheadAttention
from mmgate.hosts.table import adapts, adapts_inside

adapts(DeformableGate, MMCVMultiScaleDeformableAttention, UnevenDeformableAttention)(DeformableAttentionAdapter)
adapts_inside(DenseGate, 'attn', MultiheadAttention)
