"""mmdet's attentions as hosts."""

from __future__ import annotations

from typing import Any

import torch
from mmdet.models.backbones.pvt import SpatialReductionAttention
from mmdet.models.backbones.swin import ShiftWindowMSA, WindowMSA
from mmdet.models.layers.transformer.utils import ConditionalAttention
from mmdet.models.utils.vlfuse_helper import BiMultiHeadAttention
from torch import Tensor

from mmgate.hosts.core import attend_in_host, copy_as, holds_gates, refuse_finish, without_projections
from mmgate.hosts.table import adapts
from mmgate.hosts.torch import adapt_reduced
from mmgate.hosts.window import adapt_swin
from mmgate.layers.base.dense import DenseAttention, GatedMultiheadAttention

adapt_swin(WindowMSA, ShiftWindowMSA)
adapt_reduced(SpatialReductionAttention)


@holds_gates(
    ConditionalAttention,
    refuses=lambda host, core: (
        'splits heads into two streams, but those of a conditional cross-attention are content and position already.'
        if host.cross_attn and core.two_streams
        else None
    ),
)
class GatedConditionalAttention(ConditionalAttention):
    """Drop-in for ``ConditionalAttention`` (Conditional DETR, DAB-DETR) that holds a gate.

    Content and position are projected apart there, and in cross-attention their heads stand side by side; the gate
    reads their sum, as it would in DETR.
    """

    gate: Any

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
        split = self.gate.split_heads
        q, k, v = split(q), split(k), split(v)
        if ref_sine_embed is not None:
            q = torch.cat([q, split(self.qpos_sine_proj(ref_sine_embed))], -1)  # (B, H, N, 2 d)
            k = torch.cat([k, split(k_pos)], -1)
            gate_query = gate_query + ref_sine_embed
        inputs = (gate_query, key + key_pos, key)
        out = attend_in_host(
            self.gate, (q, k, v), inputs, self.out_proj, attn_mask=attn_mask, key_padding_mask=key_padding_mask
        )
        return query + self.proj_drop(out)


class GatedBiMultiHeadAttention(BiMultiHeadAttention):
    """Drop-in for ``BiMultiHeadAttention`` (GLIP, Grounding DINO) that holds a gate for each direction.

    The host's two directions share their logits; with a gate each of its own, here they are computed for each. The
    host's clamp of logits to +-50000, which keeps half precision finite, is not needed: both are formed in float32.
    """

    gate_v: Any  # of vision, which attends to language
    gate_l: Any

    def forward(
        self,
        vision: Tensor,
        lang: Tensor,
        attention_mask_v: Tensor | None = None,
        attention_mask_l: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend both ways.

        Args:
            vision: ``(B, N, Cv)``.
            lang: ``(B, M, Cl)``.
            attention_mask_v: ``(B, N)`` bool, True masks.
            attention_mask_l: ``(B, M)`` numbers, of which 0 masks. A bool mask, as Grounding DINO hands it in, masks
                nothing: the host adds it to the logits.

        Returns:
            What language adds to vision ``(B, N, Cv)``, and vision to language ``(B, M, Cl)``.
        """
        split = self.gate_v.split_heads
        states_v, states_l = split(self.v_proj(vision)), split(self.l_proj(lang))  # (B, H, N|M, d)
        values_v, values_l = split(self.values_v_proj(vision)), split(self.values_l_proj(lang))
        bias = None
        if attention_mask_l is not None and attention_mask_l.dtype != torch.bool:
            masked = (attention_mask_l == 0)[:, None, None]
            bias = masked.to(states_v.dtype) * (torch.finfo(states_v.dtype).min / 2)
        delta_v = attend_in_host(
            self.gate_v, (states_v, states_l, values_l), (vision, lang, lang), self.out_v_proj, bias
        )
        delta_l = attend_in_host(
            self.gate_l,
            (states_l, states_v, values_v),
            (lang, vision, vision),
            self.out_l_proj,
            key_padding_mask=attention_mask_v,
        )
        return delta_v, delta_l


@adapts(GatedMultiheadAttention, BiMultiHeadAttention)
def bidirectional(
    gate: type[GatedMultiheadAttention], host: BiMultiHeadAttention, /, **options: Any
) -> GatedBiMultiHeadAttention:
    """Hold two gates beside the host's own parameters.

    Raises:
        ValueError: A gate that acts on the output, of which vision and language have widths of their own.
    """

    def make(own: int, other: int) -> DenseAttention:
        sizes: dict[str, Any] = dict(qdim=own, kdim=other, vdim=other, batch_first=True)
        core = gate.core(host.embed_dim, host.num_heads, host.dropout, **sizes, **options)
        refuse_finish(gate, core, own)
        return without_projections(core)

    gates = dict(gate_v=make(host.v_dim, host.l_dim), gate_l=make(host.l_dim, host.v_dim))
    return copy_as(GatedBiMultiHeadAttention, host, **gates)
