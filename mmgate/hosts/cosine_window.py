"""Gated attention inside Swin v2's windows, whose logits are cosines."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.hosts.core import attend_in_host
from mmgate.layers.base.dense import DenseAttention

LARGEST = math.log(100.0)  # of logit_scale


class GatedCosineWindowMSA(nn.Module):
    """Drop-in for mmpretrain's ``WindowMSAV2`` that holds a gate, with the host's own parameters.

    The logits are ``cos(q, k) / tau``: the gate gets unit queries and keys, ``1 / tau`` shared out evenly between
    them. A gate of queries or keys (G3, G4) therefore acts after they are normalised, before which it would be undone.
    The continuous position bias and the mask of shifted windows are added to the logits after the gate.

    Args:
        gate: Without projections, see :func:`~mmgate.hosts.core.gate_alone`.
        host: The ``WindowMSAV2``, whose modules and parameters become this one's.

    Source: Swin Transformer V2 (arXiv 2111.09883), Eq. 2 and section 3.3.
    """

    def __init__(self, gate: DenseAttention, host: Any) -> None:
        super().__init__()
        self.relative_coords_table: Tensor
        self.relative_position_index: Tensor
        self.gate = gate
        self.qkv, self.proj, self.proj_drop, self.cpb_mlp = host.qkv, host.proj, host.proj_drop, host.cpb_mlp
        self.logit_scale, self.q_bias, self.v_bias = host.logit_scale, host.q_bias, host.v_bias
        for name in ('relative_coords_table', 'relative_position_index'):
            self.register_buffer(name, getattr(host, name))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend within windows.

        Args:
            x: Windows ``(B nW, N, C)``, those of an image next to each other.
            mask: ``(nW, N, N)``, added to the logits.
        """
        bias = None if self.q_bias is None else torch.cat((self.q_bias, torch.zeros_like(self.q_bias), self.v_bias))
        projected = F.linear(x, self.qkv.weight, bias).chunk(3, -1)
        query, key, value = (self.gate.split_heads(part) for part in projected)  # (B nW, H, N, d)
        # cos(q, k) / tau = q' k' / sqrt(d)
        factor = (self.logit_scale.clamp(max=LARGEST).exp() * query.shape[-1] ** 0.5).sqrt()  # (H, 1, 1)
        # normalised in the precision of the parameters, which under autocast is not that of the projections
        unit = (F.normalize(part.to(factor.dtype), dim=-1) for part in (query, key))
        query, key = ((part * factor).to(value.dtype) for part in unit)
        bias = self._position_bias()[None]
        if mask is not None:
            bias = (bias + mask[:, None]).repeat(x.shape[0] // mask.shape[0], 1, 1, 1)
        out = attend_in_host(self.gate, (query, key, value), (x, x, x), self.proj, bias.to(query.dtype))
        return self.proj_drop(out)

    def _position_bias(self) -> Tensor:
        table = self.cpb_mlp(self.relative_coords_table).flatten(0, 2)  # (distances, H)
        return 16 * table[self.relative_position_index].permute(2, 0, 1).sigmoid()  # (H, N, N)
