r"""Differential attention as functions: the difference of two softmax attentions over the same values.

Layout: query (B, H, N, d) and key (B, H, M, d), each two halves of d' = d / 2; value (B, H, M, d);
gate (B, H, N, 1); output (B, H, N, d). Where keys are shared, query and second_query have a whole d each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import check_layout


def differential_streams(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, *, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Compute the two softmax attentions of M-DGSA and return both, ``A+ V`` and ``A- V``, ``(B, H, N, d)`` each.

    The arguments are those of :func:`differential_attention`.

    Raises:
        ValueError: Shapes or dtypes do not go together, d is odd, or there are no keys.
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
    # torch's fused kernels need queries and values of one width. Queries of width d whose other stream is 0 have the
    # same logits as those of width d / 2.
    q_plus, q_minus = query.chunk(2, -1)
    wide_plus = torch.cat([q_plus, torch.zeros_like(q_minus)], -1)
    wide_minus = torch.cat([torch.zeros_like(q_plus), q_minus], -1)
    scale = q_plus.shape[-1] ** -0.5
    plus = F.scaled_dot_product_attention(wide_plus, key, value, attn_mask=bias, dropout_p=dropout, scale=scale)
    minus = F.scaled_dot_product_attention(wide_minus, key, value, attn_mask=bias, dropout_p=dropout, scale=scale)
    return plus, minus


def differential_attention(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor, bias: Tensor | None = None, *, dropout: float = 0.0
) -> Tensor:
    r"""Compute :math:`(g A^+ - (1 - g) A^-) V` by two fused attentions, with no N x M map in memory.

    Args:
        query: Queries ``(B, H, N, d)``: those of the excitatory stream, then those of the inhibitory stream.
        key: Keys ``(B, H, M, d)`` in the same order.
        value: Values ``(B, H, M, d)``.
        gate: Gate ``(B, H, N, 1)``, 0 to 1.
        bias: Bias of both streams' logits, broadcastable to ``(B, H, N, M)``.
        dropout: Probability of dropping an attention weight.

    Returns:
        ``(B, H, N, d)``.

    Raises:
        ValueError: As in :func:`differential_streams`, or the gate has another shape.

    Source: M-DGSA, section 4.2.
    """
    check_layout(('query', query, 'B H N d'), ('gate', gate, 'B H N 1'))
    plus, minus = differential_streams(query, key, value, bias, dropout=dropout)
    return gate * plus - (1 - gate) * minus


def differential_map(query: Tensor, key: Tensor, gate: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute the attention map ``g A+ - (1 - g) A-``, ``(B, H, N, M)``, for figures and as a reference for tests."""
    plus, minus = stream_maps(query, key, bias)
    return gate * plus - (1 - gate) * minus


def stream_maps(query: Tensor, key: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute the two softmax maps ``A+`` and ``A-`` of differential attention, ``(B, H, N, M)`` each."""
    maps = []
    for q, k in zip(query.chunk(2, -1), key.chunk(2, -1), strict=True):
        logits = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        maps.append(torch.softmax(logits if bias is None else logits + bias, -1))
    return maps[0], maps[1]


def shared_key_attention(
    query: Tensor,
    second_query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    dropout: float = 0.0,
) -> Tensor:
    r"""Compute :math:`(A_1 - w A_2) V` for two sets of queries over the same keys, by two fused attentions.

    Args:
        query: Queries of the first attention ``(B, H, N, d)``.
        second_query: Queries of the second attention ``(B, H, N, d)``.
        key: Keys of both ``(B, H, M, d)``.
        value: Values of both ``(B, H, M, e)``.
        weight: Weight of the second attention ``(B, H, N, 1)``, 0 to 1.
        bias: Bias of both attentions' logits, broadcastable to ``(B, H, N, M)``.
        dropout: Probability of dropping an attention weight, separately in each attention.

    Returns:
        ``(B, H, N, e)``.

    Raises:
        ValueError: Shapes or dtypes do not go together, or there are no keys.

    Source: Differential Transformer V2 (Ye et al., January 2026, huggingface.co/blog/microsoft/diff-attn-v2).
    """
    check_layout(
        ('query', query, 'B H N d'),
        ('second_query', second_query, 'B H N d'),
        ('key', key, 'B H M d'),
        ('value', value, 'B H M e'),
        ('weight', weight, 'B H N 1'),
        ('bias', bias, 'B|1 H|1 N|1 M|1'),
        filled='M d',
    )
    first = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)
    second = F.scaled_dot_product_attention(second_query, key, value, attn_mask=bias, dropout_p=dropout)
    return first - weight * second


def shared_key_map(
    query: Tensor, second_query: Tensor, key: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Compute the attention map ``A1 - w A2``, ``(B, H, N, M)``, for figures and as a reference for tests."""
    maps = []
    for q in (query, second_query):
        logits = q @ key.transpose(-1, -2) / q.shape[-1] ** 0.5
        maps.append(torch.softmax(logits if bias is None else logits + bias, -1))
    return maps[0] - weight * maps[1]
