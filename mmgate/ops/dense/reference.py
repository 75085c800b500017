"""Reference of PLuG attention: the paper's equations in torch, with N x M maps in memory."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .pairs import Modulation, Pairs


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
