"""Adapters that let gates into mmdet's attention modules (Conditional DETR, GLIP, Grounding DINO)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from mmdet.models.backbones.pvt import SpatialReductionAttention
from mmdet.models.backbones.swin import ShiftWindowMSA, WindowMSA
from mmdet.models.layers.transformer.utils import ConditionalAttention
from mmdet.models.utils.vlfuse_helper import BiMultiHeadAttention
from torch import Tensor, nn

from mmgate.gate import Sizes
from mmgate.gates.base.dense import DenseAdapter, DenseGate
from mmgate.hosts.table import adapts
from mmgate.hosts.torch import adapt_reduced
from mmgate.hosts.window import adapt_swin

adapt_swin(WindowMSA, ShiftWindowMSA)
adapt_reduced(SpatialReductionAttention)


@adapts(DenseGate, ConditionalAttention)
class ConditionalAttentionAdapter(DenseAdapter):
    """Adapter that lets dense gates into mmdet's ``ConditionalAttention`` (Conditional DETR, DAB-DETR).

    The host projects content and position separately. In cross-attention it concatenates them in every head. The gate
    reads their sum, as it would in DETR.
    """

    cross_attn: bool
    keep_query_pos: bool
    qcontent_proj: nn.Module
    qpos_proj: nn.Module
    qpos_sine_proj: nn.Module
    kcontent_proj: nn.Module
    kpos_proj: nn.Module
    v_proj: nn.Module
    out_proj: nn.Module
    proj_drop: nn.Module

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Read the sizes off an attention module (the host), whose cross-attention has queries of twice the width."""
        sizes = super().sizes(host)
        if not host.cross_attn:
            return sizes
        reason = 'those of a conditional cross-attention are content and position already'
        return replace(sizes, query_width=2 * sizes.head_dim, why_whole_heads=reason)

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
        """Attend with the gate and add ``query``; the arguments are those of mmdet's ``ConditionalAttention``.

        Tensors are ``(B, N|M, C)``.

        Raises:
            ValueError: A cross-attention without ``key_pos`` or ``ref_sine_embed``.
        """
        if not self.cross_attn:
            key = query
            key_pos = query_pos
            ref_sine_embed = None
        elif key_pos is None or ref_sine_embed is None:
            raise ValueError('Conditional cross-attention needs key_pos and ref_sine_embed.')
        with_query_pos = is_first or self.keep_query_pos or not self.cross_attn
        q = self.qcontent_proj(query)
        k = self.kcontent_proj(key)
        v = self.v_proj(key)
        k_pos = self.kpos_proj(key_pos)
        gate_query = query
        if with_query_pos:
            q = q + self.qpos_proj(query_pos)
            k = k + k_pos
            gate_query = gate_query + query_pos
        split = self.gate.split_heads
        q, k, v = (split(x) for x in (q, k, v))
        if ref_sine_embed is not None:
            q = torch.cat([q, split(self.qpos_sine_proj(ref_sine_embed))], -1)  # (B, H, N, 2 d)
            k = torch.cat([k, split(k_pos)], -1)
            gate_query = gate_query + ref_sine_embed
        inputs = (gate_query, key + key_pos, key)
        out = self.attend_gated(
            (q, k, v), inputs, self.out_proj, attn_mask=attn_mask, key_padding_mask=key_padding_mask
        )
        return query + self.proj_drop(out)


@adapts(DenseGate, BiMultiHeadAttention)
class BiMultiHeadAttentionAdapter(DenseAdapter):
    """Adapter that lets dense gates into mmdet's ``BiMultiHeadAttention`` (GLIP, Grounding DINO), one per direction.

    The two directions of the host share their logits. Here each direction has its gate, and logits are computed for
    each. The host clamps logits to +-50000 to keep half precision finite. Here they are formed in float32 instead.
    """

    v_proj: nn.Module
    l_proj: nn.Module
    values_v_proj: nn.Module
    values_l_proj: nn.Module
    out_v_proj: nn.Module
    out_l_proj: nn.Module

    @classmethod
    def sizes(cls, host: Any) -> dict[str, Sizes]:  # type: ignore[override]
        """Read the sizes off an attention module (the host), for its two gates.

        ``vision`` is for attention from the image to words, ``language`` for the reverse.
        """
        sizes = Sizes(host.embed_dim, host.num_heads, dropout=host.dropout)
        widths = dict(vision=(host.v_dim, host.l_dim), language=(host.l_dim, host.v_dim))
        return {name: replace(sizes, inputs=(own, other, other), output=own) for name, (own, other) in widths.items()}

    def forward(
        self,
        vision: Tensor,
        lang: Tensor,
        attention_mask_v: Tensor | None = None,
        attention_mask_l: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend from the image to the words and from the words to the image, each with its gate.

        Args:
            vision: ``(B, N, Cv)``.
            lang: ``(B, M, Cl)``.
            attention_mask_v: ``(B, N)`` bool, True masks.
            attention_mask_l: ``(B, M)`` numbers, of which 0 masks. A bool mask, as Grounding DINO hands it in, masks
                nothing: the host adds it to the logits.

        Returns:
            The update of vision ``(B, N, Cv)`` and that of language ``(B, M, Cl)``.
        """
        gates = self.gate
        split = gates['vision'].split_heads
        states_v = split(self.v_proj(vision))  # (B, H, N, d)
        states_l = split(self.l_proj(lang))  # (B, H, M, d)
        values_v = split(self.values_v_proj(vision))
        values_l = split(self.values_l_proj(lang))
        bias = None
        if attention_mask_l is not None and attention_mask_l.dtype != torch.bool:
            masked = (attention_mask_l == 0)[:, None, None]
            bias = masked.to(states_v.dtype) * (torch.finfo(states_v.dtype).min / 2)
        delta_v = self.attend_gated(
            (states_v, states_l, values_l), (vision, lang, lang), self.out_v_proj, bias, gate=gates['vision']
        )
        delta_l = self.attend_gated(
            (states_l, states_v, values_v),
            (lang, vision, vision),
            self.out_l_proj,
            key_padding_mask=attention_mask_v,
            gate=gates['language'],
        )
        return delta_v, delta_l
