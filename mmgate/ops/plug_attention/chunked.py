"""PLuG attention in chunks of query rows, formed anew in the backward pass, so that no whole map is in memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from . import reference
from .reference import Modulation

CHUNK = 1 << 19  # elements of (B, H, rows, M) that exist at a time


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate_query: Tensor,
    gate_key: Tensor,
    modulation: Modulation,
    bias: Tensor | None = None,
    residual: bool = True,
    position: str = 'pre_softmax',
    dropout: float = 0.0,
) -> Tensor:
    """Attend; arguments and return value as :func:`mmgate.ops.plug_attention`."""
    batch, heads, rows, _ = query.shape
    step = max(1, CHUNK // max(1, batch * heads * key.shape[-2]))
    columns = key, value, gate_key
    if rows > step and key.dtype.itemsize < 4:  # the chunks' gradients are summed in 32 bits
        columns = tuple(x.float() for x in columns)  # type: ignore[assignment]

    def attend_rows(query: Tensor, gate_query: Tensor, bias: Tensor | None, *columns: Tensor) -> Tensor:
        of_key, of_value, of_gate = (x.to(like.dtype) for x, like in zip(columns, (key, value, gate_key), strict=True))
        gates = gate_query, of_gate, modulation
        return reference.attend(query, of_key, of_value, *gates, bias, residual, position, dropout)

    outputs = []
    for part in (slice(start, start + step) for start in range(0, max(rows, 1), step)):
        of_rows = bias if bias is None or bias.shape[-2] == 1 else bias[:, :, part]
        inputs = query[:, :, part], gate_query[:, :, part], of_rows, *columns
        if rows > step and torch.is_grad_enabled():
            outputs.append(checkpoint(attend_rows, *inputs, use_reentrant=False, preserve_rng_state=dropout > 0))
        else:
            outputs.append(attend_rows(*inputs))
    return torch.cat(outputs, -2)
