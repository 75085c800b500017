"""mmcv's attentions as hosts, or what stands for them where there is no mmcv."""

from __future__ import annotations

from typing import Any

from mmgate.hosts.core import copy_as
from mmgate.hosts.table import adapts
from mmgate.hosts.torch import multihead_attention as torch_host
from mmgate.layers import MultiScaleDeformableAttention
from mmgate.layers.base.dense import GatedMultiheadAttention
from mmgate.layers.base.of_mmcv import MMCVMultiScaleDeformableAttention, MultiheadAttention


@adapts(MultiScaleDeformableAttention, MMCVMultiScaleDeformableAttention)
def deformable_attention(
    gate: type[MultiScaleDeformableAttention], host: MMCVMultiScaleDeformableAttention, /, **options: Any
) -> MultiScaleDeformableAttention:
    """Take over sizes, dropout and layout."""
    return gate(
        host.embed_dims,
        host.num_heads,
        host.num_levels,
        host.num_points,
        im2col_step=host.im2col_step,
        dropout=host.dropout.p,
        batch_first=host.batch_first,
        norm_cfg=host.norm_cfg,
        init_cfg=host.init_cfg,
        value_proj_ratio=(host.value_proj.out_features + 0.5) / host.embed_dims,  # mmcv rounds down
        **options,
    )


@adapts(GatedMultiheadAttention, MultiheadAttention)
def multihead_attention(
    gate: type[GatedMultiheadAttention], host: MultiheadAttention, /, **options: Any
) -> GatedMultiheadAttention:
    """Keep mmcv's wrapper and gate the module in it."""
    return copy_as(gate, host, attn=torch_host(gate, host.attn, **options))
