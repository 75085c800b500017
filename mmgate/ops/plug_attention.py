r"""PLuG attention: softmax attention whose logits are gated pair by pair.

Layout: query (B, H, N, d); key, value (B, H, M, d); gate_query (B, H|1, N, g); gate_key (B, H|1, M, g);
mask bias broadcastable to (B, H, N, M); output (B, H, N, d).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from . import plug_attention_triton, triton_backend
from .dispatch import Backend, find, select
from .library import autocast_dtype, is_compiling, outside_graphs
from .plug_attention_rows import GatedRows

CHUNK = 1 << 21  # elements of (B, H, rows, M) that exist at a time
Modulation = Callable[[Tensor], Tensor]


@outside_graphs
def plug_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate_query: Tensor,
    gate_key: Tensor,
    modulation: Modulation,
    bias: Tensor | None = None,
    *,
    residual: bool = True,
    position: str = 'pre_softmax',
    dropout: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    r"""Attend with logits :math:`A \odot (1 + G)`, :math:`A = QK^T/\sqrt d`, :math:`G = m(Q_g K_g^T/\sqrt g)`.

    The bias (masks) is added after the gate, so that a masked pair stays masked.

    Args:
        query: ``(B, H, N, d)``, floating point.
        key: ``(B, H, M, d)``.
        value: ``(B, H, M, d)``.
        gate_query: ``(B, 1, N, g)``, shared by the heads, or ``(B, H, N, g)``.
        gate_key: ``(B, 1, M, g)`` or ``(B, H, M, g)``.
        modulation: Elementwise map from raw gate logits to the gate G.
        bias: Added to the gated logits; broadcasts to ``(B, H, N, M)``. No row may be -inf throughout.
        residual: Multiply by ``1 + G``, else by ``G``.
        position: Gate the logits (``'pre_softmax'``) or the attention weights (``'post_softmax'``).
        dropout: Probability of dropping an attention weight.
        backend: ``'torch'`` (reference, holds all N x M maps), ``'chunked'`` (rows in chunks, recomputed in the
            backward pass), ``'triton'`` (no map at all, CUDA) or ``'auto'``. ``MMGATE_PLUG_ATTENTION`` has the last
            word.

    Returns:
        ``(B, H, N, d)``.

    Raises:
        ValueError: An unknown backend.

    Source: PLuG attention, Eq. 2 to 7, Eq. 17 for ``'post_softmax'``.
    """
    run = select('plug_attention', BACKENDS, query, backend).run
    return run(
        query, key, value, gate_query, gate_key, modulation, bias, residual=residual, position=position, dropout=dropout
    )


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
    """Return the attention weights ``(B, H, N, M)`` of :func:`plug_attention`."""
    logits = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5  # (B, H, N, M)
    factor = _factor(gate_query, gate_key, modulation, residual)
    if position == 'pre_softmax':
        logits = logits * factor
    weights = (logits if bias is None else logits + bias).softmax(-1)
    return (weights if position == 'pre_softmax' else weights * factor).to(query.dtype)


def _factor(gate_query: Tensor, gate_key: Tensor, modulation: Modulation, residual: bool) -> Tensor:
    """Return ``1 + G`` or ``G``, ``(B, H|1, N, M)``, in no less than 32 bits.

    In bfloat16 the sum has four values for all G of less than 0.015, where gates start.
    """
    raw = gate_query @ gate_key.transpose(-1, -2) / gate_query.shape[-1] ** 0.5
    gate = modulation(raw)
    gate = gate.float() if gate.dtype.itemsize < 4 else gate
    return 1 + gate if residual else gate


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate_query: Tensor,
    gate_key: Tensor,
    modulation: Modulation,
    bias: Tensor | None = None,
    *,
    residual: bool = True,
    position: str = 'pre_softmax',
    dropout: float = 0.0,
) -> Tensor:
    """Reference of :func:`plug_attention`: the equations, with the maps in memory."""
    weights = attention_map(query, key, gate_query, gate_key, modulation, bias, residual=residual, position=position)
    return F.dropout(weights, dropout, training=dropout > 0) @ value


def _chunked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate_query: Tensor,
    gate_key: Tensor,
    modulation: Modulation,
    bias: Tensor | None = None,
    *,
    residual: bool = True,
    position: str = 'pre_softmax',
    dropout: float = 0.0,
) -> Tensor:
    batch, heads, rows, _ = query.shape
    step = max(1, CHUNK // max(1, batch * heads * key.shape[-2]))
    options: dict[str, Any] = dict(residual=residual, position=position, dropout=dropout)
    if rows <= step:
        return reference(query, key, value, gate_query, gate_key, modulation, bias, **options)
    learnt_bias = bias is not None and bias.requires_grad
    if dropout or learnt_bias or is_compiling() or not isinstance(modulation, nn.Module):
        return _checkpointed(step, query, key, value, gate_query, gate_key, modulation, bias, options)

    def factor(gate_query: Tensor, gate_key: Tensor) -> Tensor:
        return _factor(gate_query, gate_key, modulation, residual)

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

    def attend(
        query: Tensor, gate_query: Tensor, key: Tensor, value: Tensor, gate_key: Tensor, bias: Tensor | None
    ) -> Tensor:
        return reference(query, key, value, gate_query, gate_key, modulation, bias, **options)

    outputs = []
    for start in range(0, query.shape[-2], step):
        part = slice(start, start + step)
        chunk_bias = bias if bias is None or bias.shape[-2] == 1 else bias[:, :, part]
        inputs = query[:, :, part], gate_query[:, :, part], key, value, gate_key, chunk_bias
        recomputes = torch.is_grad_enabled()
        outputs.append(checkpoint(attend, *inputs, use_reentrant=False) if recomputes else attend(*inputs))
    return torch.cat(outputs, -2)


def check_backend(name: str) -> None:
    """Raise ValueError if ``name`` is neither ``'auto'`` nor the name of a backend."""
    if name != 'auto':
        find('plug_attention', BACKENDS, name)


BACKENDS = (
    Backend('chunked', lambda query: None, _chunked),
    Backend('torch', lambda query: None, reference),
    # Not in 'auto', which never passes the reference, until a GPU has measured it.
    Backend('triton', triton_backend.why_not, plug_attention_triton.attend),
)
