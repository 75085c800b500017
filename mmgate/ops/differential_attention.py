r"""Differential gated attention: the difference of two softmax attentions over the same values.

Layout: query (B, H, N, d) and key (B, H, M, d), each two streams of d' = d / 2; value (B, H, M, d);
gate (B, H, N, 1); output (B, H, N, d).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import check_layout


def differential_streams(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, *, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return ``A+ V`` and ``A- V``, ``(B, H, N, d)`` each; arguments as :func:`differential_attention`.

    Raises:
        ValueError: Shapes or dtypes that do not go together, an odd d, or no keys.
    """
    check_layout(
        ('query', query, 'B H N d'),
        ('key', key, 'B H M d'),
        ('value', value, 'B H M e'),
        ('bias', bias, 'B|1 H|1 N|1 M|1'),
        filled='M d',
    )
    if query.shape[-1] % 2:
        raise ValueError(f'query must have an even d, half of it for each stream, got {tuple(query.shape)}.')
    # Queries of width d with the other stream at 0 give the same logits, and keep to the fused kernels, which need
    # queries and values of one width.
    q_plus, q_minus = query.chunk(2, -1)
    streams = torch.cat([q_plus, torch.zeros_like(q_minus)], -1), torch.cat([torch.zeros_like(q_plus), q_minus], -1)
    options: dict[str, Any] = dict(attn_mask=bias, dropout_p=dropout, scale=q_plus.shape[-1] ** -0.5)
    plus, minus = (F.scaled_dot_product_attention(q, key, value, **options) for q in streams)
    return plus, minus


def differential_attention(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor, bias: Tensor | None = None, *, dropout: float = 0.0
) -> Tensor:
    r"""Return :math:`(g A^+ - (1 - g) A^-) V` by two fused attentions, no N x M map in memory.

    Args:
        query: ``(B, H, N, d)``: excitatory stream, then inhibitory stream.
        key: ``(B, H, M, d)``: the same.
        value: ``(B, H, M, d)``.
        gate: ``(B, H, N, 1)``, 0 to 1.
        bias: Added to both streams' logits.
        dropout: Probability of dropping an attention weight.

    Raises:
        ValueError: As :func:`differential_streams`, or a gate of another shape.

    Source: M-DGSA, section 4.2.
    """
    check_layout(('query', query, 'B H N d'), ('gate', gate, 'B H N 1'))
    plus, minus = differential_streams(query, key, value, bias, dropout=dropout)
    return gate * plus - (1 - gate) * minus


def differential_map(query: Tensor, key: Tensor, gate: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the signed attention map ``(B, H, N, M)`` of :func:`differential_attention`; the reference."""
    plus, minus = stream_maps(query, key, bias)
    return gate * plus - (1 - gate) * minus


def stream_maps(query: Tensor, key: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the maps ``A+`` and ``A-``, ``(B, H, N, M)`` each."""
    maps = []
    for q, k in zip(query.chunk(2, -1), key.chunk(2, -1), strict=True):
        logits = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        maps.append(torch.softmax(logits if bias is None else logits + bias, -1))
    return maps[0], maps[1]
