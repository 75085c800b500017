"""PLuG attention in chunks of query rows, so that no whole map is in memory; any option of the operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..library import autocast_dtype, is_compiling
from . import reference
from .reference import Modulation
from .rows import GatedRows

CHUNK = 1 << 21  # elements of (B, H, rows, M) that exist at a time


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
    options: dict[str, Any] = dict(residual=residual, position=position, dropout=dropout)
    if rows <= step:
        return reference.attend(query, key, value, gate_query, gate_key, modulation, bias, **options)
    learnt_bias = bias is not None and bias.requires_grad
    if dropout or learnt_bias or is_compiling() or not isinstance(modulation, nn.Module):
        return _checkpointed(step, query, key, value, gate_query, gate_key, modulation, bias, options)

    def factor(gate_query: Tensor, gate_key: Tensor) -> Tensor:
        return reference.gate_factor(gate_query, gate_key, modulation, residual)

    device = query.device.type
    tensors = (query, key, value, gate_query, gate_key)
    narrow = autocast_dtype(device)
    if narrow is not None:
        tensors = tuple(x.to(narrow) for x in tensors)  # type: ignore[assignment]
    with torch.autocast(device, enabled=False):
        return GatedRows.apply(step, position == 'post_softmax', factor, bias, *tensors, *modulation.parameters())


def _checkpointed(
    step: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate_query: Tensor,
    gate_key: Tensor,
    modulation: Modulation,
    bias: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """The chunks under autograd, for what has no rule of its own: dropout, a learnt bias, any modulation."""

    def attend_rows(
        query: Tensor, gate_query: Tensor, key: Tensor, value: Tensor, gate_key: Tensor, bias: Tensor | None
    ) -> Tensor:
        return reference.attend(query, key, value, gate_query, gate_key, modulation, bias, **options)

    outputs = []
    for start in range(0, query.shape[-2], step):
        part = slice(start, start + step)
        chunk_bias = bias if bias is None or bias.shape[-2] == 1 else bias[:, :, part]
        inputs = query[:, :, part], gate_query[:, :, part], key, value, gate_key, chunk_bias
        recomputes = torch.is_grad_enabled()
        outputs.append(checkpoint(attend_rows, *inputs, use_reentrant=False) if recomputes else attend_rows(*inputs))
    return torch.cat(outputs, -2)
