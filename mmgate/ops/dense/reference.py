"""The arguments of PLuG attention, which every backend gets, and its reference: the paper's equations in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from ..layout import POSITIONS, check_layout

Modulation = Callable[[Tensor], Tensor]


class Pairs(NamedTuple):
    """Arguments of PLuG attention; see :func:`mmgate.ops.plug_attention` for their meanings.

    Attributes:
        query: ``(B, H, N, d)``.
        key: ``(B, H, M, d)``.
        value: ``(B, H, M, e)``.
        gate_query: ``(B, H|1, N, g)``.
        gate_key: ``(B, H|1, M, g)``.
        modulation: Elementwise function from raw gates to gates.
        bias: Four axes that broadcast to ``(B, H, N, M)``, or None.
        residual: True for the factor ``1 + G``, False for ``G``.
        position: One of :data:`POSITIONS`.
        dropout: Probability of dropping an attention weight.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    gate_query: Tensor
    gate_key: Tensor
    modulation: Modulation
    bias: Tensor | None = None
    residual: bool = True
    position: str = 'pre_softmax'
    dropout: float = 0.0


def check(pairs: Pairs) -> None:
    """Check that pairs are such as a backend can take; each backend checks what it alone does not support.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: See :func:`mmgate.ops.plug_attention`.
    """
    if pairs.position not in POSITIONS:
        raise ValueError(f'position={pairs.position!r} is unknown; choose one of {", ".join(POSITIONS)}.')
    check_layout(
        ('query', pairs.query, 'B H N d'),
        ('key', pairs.key, 'B H M d'),
        ('value', pairs.value, 'B H M e'),
        ('gate_query', pairs.gate_query, 'B G N g'),
        ('gate_key', pairs.gate_key, 'B G M g'),
        filled='d g',
    )
    # A bias may have another dtype.
    check_layout(
        ('query', pairs.query, 'B H N d'),
        ('key', pairs.key, 'B H M d'),
        ('bias', pairs.bias, 'B|1 H|1 N|1 M|1'),
        one_dtype=False,
    )
    heads = pairs.query.shape[1]
    if pairs.gate_query.shape[1] not in (1, heads):
        raise ValueError(f'gate_query must have 1 head or the {heads} of query, got {pairs.gate_query.shape[1]}.')


def attention_map(
    query: Tensor,
    key: Tensor,
    gate_query: Tensor,
    gate_key: Tensor,
    modulation: Modulation,
    bias: Tensor | None = None,
    *,
    residual: bool = True,
    position: str = 'pre_softmax',
) -> Tensor:
    """Compute PLuG's attention weights ``(B, H, N, M)``; arguments as in :func:`mmgate.ops.plug_attention`."""
    # The queries are scaled before the product, which may leave half precision.
    logits = query * query.shape[-1] ** -0.5 @ key.transpose(-1, -2)  # (B, H, N, M)
    factor = gate_factor(gate_query, gate_key, modulation, residual)
    if position == 'pre_softmax':
        logits = logits * factor
    weights = (logits if bias is None else logits + bias).softmax(-1)
    return (weights if position == 'pre_softmax' else weights * factor).to(query.dtype)


def raw_gates(gate_query: Tensor, gate_key: Tensor) -> Tensor:
    """Compute the raw gates of all pairs: scaled products of the gate's queries and keys, ``(B, H|1, N, M)``."""
    return gate_query * gate_query.shape[-1] ** -0.5 @ gate_key.transpose(-1, -2)


def gate_factor(gate_query: Tensor, gate_key: Tensor, modulation: Modulation, residual: bool) -> Tensor:
    """Compute the factor that multiplies the logits: ``1 + G``, or ``G`` without residual, ``(B, H|1, N, M)``.

    It has at least 32 bits. In bfloat16 the sum would have only four values for all G below 0.015, where gates start.
    """
    gate = modulation(raw_gates(gate_query, gate_key))
    gate = gate.float() if gate.dtype.itemsize < 4 else gate
    return 1 + gate if residual else gate


def attend(pairs: Pairs) -> Tensor:
    """Compute PLuG attention by its equations, with N x M maps in memory."""
    weights = attention_map(
        pairs.query,
        pairs.key,
        pairs.gate_query,
        pairs.gate_key,
        pairs.modulation,
        pairs.bias,
        residual=pairs.residual,
        position=pairs.position,
    )
    return F.dropout(weights, pairs.dropout, training=pairs.dropout > 0) @ pairs.value
