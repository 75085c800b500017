"""Adapters that let gates into mmcv's attention modules or, without mmcv, into the modules that replace them."""

from __future__ import annotations

from typing import Any

from mmgate.hosts.readings import Given, Sampled, deformable_readings, reads
from mmgate.hosts.table import adapts, adapts_inside
from mmgate.layers.base.deformable import DeformableGate, GatedDeformableAttention
from mmgate.layers.base.dense import DenseGate
from mmgate.layers.base.mmcv_or_torch import MMCVMultiScaleDeformableAttention, MultiheadAttention

adapts(DeformableGate, MMCVMultiScaleDeformableAttention)(GatedDeformableAttention)
adapts_inside(DenseGate, 'attn', MultiheadAttention)


def _of_mmcv(module: Any, given: Given) -> Sampled:
    query = given['query']
    position = given.get('query_pos')
    query = query if position is None else query + position
    query = query if module.batch_first else query.transpose(0, 1)
    sizes = (module.num_heads, module.num_levels, module.num_points)
    offsets = module.sampling_offsets(query).unflatten(-1, (*sizes, 2))
    logits = module.attention_weights(query).unflatten(-1, sizes)
    return Sampled(query, offsets, logits, given['reference_points'], given['spatial_shapes'], module.num_points)


reads(MMCVMultiScaleDeformableAttention, **deformable_readings(_of_mmcv))
