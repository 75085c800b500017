"""mmpretrain's attentions of further vision transformers as hosts: TinyViT's and XCiT's."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from mmpretrain.models.backbones.xcit import XCA
from mmpretrain.models.utils.attention import LeAttention
from torch import Tensor

from mmgate.hosts.core import attend_in_host
from mmgate.hosts.subclassed import held_by
from mmgate.hosts.table import adapts
from mmgate.layers.base.dense import GatedMultiheadAttention
from mmgate.layers.plug_dense import PLuGAttention


class GatedLeAttention(LeAttention):
    """Drop-in for ``LeAttention`` (TinyViT) that holds a gate; the bias of positions is added after it."""

    gate: Any

    def train(self, mode: bool = True) -> GatedLeAttention:
        """Set the mode; the host's returns nothing."""
        super().train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Attend over ``(B, N, C)`` tokens."""
        x = self.norm(x)
        joint = self.qkv(x).unflatten(-1, (self.num_heads, 3, self.key_dim))
        query, key, value = joint.permute(3, 0, 2, 1, 4)  # (B, H, N, d)
        # the host keeps the biases in evaluation and drops them for training
        bias = self.ab if hasattr(self, 'ab') else self.attention_biases[:, self.attention_bias_idxs]
        return attend_in_host(self.gate, (query, key, value), (x, x, x), self.proj, bias[None].to(query.dtype))


@adapts(GatedMultiheadAttention, LeAttention)
def le_attention(gate: type[GatedMultiheadAttention], host: LeAttention, /, **options: Any) -> GatedLeAttention:
    """Hold the gate's parameters beside the host's own.

    Raises:
        ValueError: The values are wider than the keys (LeViT), or the gate does not fit.
    """
    if host.d != host.key_dim:
        raise ValueError(
            f'{gate.__name__} gates heads of one width, but this LeAttention has keys of {host.key_dim} and values of '
            f'{host.d} channels.'
        )
    sizes = (host.num_heads * host.key_dim, host.num_heads, 0.0)
    return held_by(GatedLeAttention, host, gate, *sizes, width=host.qkv.in_features, **options)


class GatedXCA(XCA):
    """Drop-in for XCiT's cross-covariance attention that holds a PLuG gate.

    There the d channels of a head attend to each other, so that logits and gate are d x d maps. The gate is formed as
    the host forms its logits: from ``Wq x`` and ``Wk x``, d channels each, normalised over the tokens. The paper says
    that PLuG acts within this layer, but not how its products are scaled; normalised, they do not grow with the image.
    """

    gate: PLuGAttention
    over_channels = True  # there is no map of tokens to look at

    def forward(self, x: Tensor) -> Tensor:
        """Attend over the channels of ``(B, N, C)`` tokens."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 4, 1)  # (B, H, d, N)
        tokens = x.shape[1]
        # what attends here divides its products by the square root of their length
        query = F.normalize(query, dim=-1) * (self.temperature * tokens**0.5).to(query.dtype)
        out = self.gate.attend_gated(query, F.normalize(key, dim=-1), value, self._gates(x), None)
        return self.proj_drop(self.proj(out.permute(0, 3, 1, 2).flatten(2)))

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query, key = (F.normalize(gate.transpose(-1, -2), dim=-1) for gate in self.gate.gates((x, x, x)))
        return query * x.shape[1] ** 0.5, key  # (B, H|1, d, N)


@adapts(GatedMultiheadAttention, XCA)
def cross_covariance(gate: type[GatedMultiheadAttention], host: XCA, /, **options: Any) -> GatedXCA:
    """Hold the gate's parameters beside the host's own.

    Raises:
        ValueError: Another gate than PLuG, or one of another width than the heads.
    """
    channels = host.proj.in_features
    held = held_by(GatedXCA, host, gate, channels, host.num_heads, host.attn_drop.p, **options)
    if not isinstance(held.gate, PLuGAttention):
        raise ValueError(
            f'{gate.__name__} gates tokens, but in a cross-covariance attention (XCA) the channels attend to each '
            'other; PLuGMultiheadAttention gates their pairs.'
        )
    if held.gate.gate_width != held.gate.head_dim:
        raise ValueError(
            f'{gate.__name__} makes a gate of {held.gate.gate_width} x {held.gate.gate_width} pairs of '
            f'channels, but the heads of this XCA have {held.gate.head_dim}; leave ratio at 1.'
        )
    return held
