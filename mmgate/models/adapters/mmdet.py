"""mmdet's attentions as hosts."""

from __future__ import annotations

from typing import Any

import torch
from mmdet.models.backbones.pvt import SpatialReductionAttention
from mmdet.models.backbones.swin import ShiftWindowMSA, WindowMSA
from mmdet.models.layers.transformer.utils import ConditionalAttention
from torch import Tensor

from mmgate.layers.dense import DenseAttention, GatedMultiheadAttention
from mmgate.layers.dgsa import DifferentialGatedAttention
from mmgate.layers.gate_alone import attend_in_host, gate_alone

from .pairs import adapts
from .reduced import adapt_reduced
from .swin import adapt_swin

adapt_swin(WindowMSA, ShiftWindowMSA)
adapt_reduced(SpatialReductionAttention)


class GatedConditionalAttention(ConditionalAttention):
    """Drop-in for ``ConditionalAttention`` (Conditional DETR, DAB-DETR) that holds a gate.

    Content and position are projected apart there, and in cross-attention their heads stand side by side; the gate
    reads their sum, as it would in DETR.
    """

    def __init__(self, gate: DenseAttention, host: ConditionalAttention) -> None:
        super().__init__(
            host.embed_dims,
            host.num_heads,
            host.attn_drop.p,
            host.proj_drop.p,
            cross_attn=host.cross_attn,
            keep_query_pos=host.keep_query_pos,
            init_cfg=host.init_cfg,
        )
        self.gate = gate

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        query_pos: Tensor,
        ref_sine_embed: Tensor | None = None,
        key_pos: Tensor | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        is_first: bool = False,
    ) -> Tensor:
        """Attend and add ``query``; the arguments are those of ``ConditionalAttention``, ``(B, N|M, C)``."""
        if not self.cross_attn:
            key, key_pos, ref_sine_embed = query, query_pos, None
        elif key_pos is None or ref_sine_embed is None:
            raise ValueError('Conditional cross-attention needs key_pos and ref_sine_embed.')
        with_query_pos = is_first or self.keep_query_pos or not self.cross_attn
        q, k, v = self.qcontent_proj(query), self.kcontent_proj(key), self.v_proj(key)
        k_pos = self.kpos_proj(key_pos)
        gate_query = query
        if with_query_pos:
            q, k = q + self.qpos_proj(query_pos), k + k_pos
            gate_query = gate_query + query_pos
        q, k, v = self._split(q), self._split(k), self._split(v)
        if ref_sine_embed is not None:
            q = torch.cat([q, self._split(self.qpos_sine_proj(ref_sine_embed))], -1)  # (B, H, N, 2 d)
            k = torch.cat([k, self._split(k_pos)], -1)
            gate_query = gate_query + ref_sine_embed
        inputs = (gate_query, key + key_pos, key)
        out = attend_in_host(
            self.gate, (q, k, v), inputs, self.out_proj, attn_mask=attn_mask, key_padding_mask=key_padding_mask
        )
        return query + self.proj_drop(out)

    def _split(self, x: Tensor) -> Tensor:
        return self.gate.split_heads(x)


@adapts(GatedMultiheadAttention, ConditionalAttention)
def conditional(
    gate: type[GatedMultiheadAttention], host: ConditionalAttention, **options: Any
) -> GatedConditionalAttention:
    """Hold the gate's parameters beside the host's own.

    Raises:
        ValueError: A gate that needs queries as wide as values, in cross-attention.
    """
    core = gate.core(host.embed_dims, host.num_heads, host.attn_drop.p, batch_first=True, **options)
    if host.cross_attn and isinstance(core, DifferentialGatedAttention):
        raise ValueError(
            f'{gate.__name__} splits heads into two streams, but those of a conditional cross-attention are content '
            'and position already.'
        )
    gated = GatedConditionalAttention(gate_alone(core), host)
    if host.qpos_proj is None:  # Conditional DETR's decoder removes it from all layers but the first
        gated.qpos_proj = None
    return gated
