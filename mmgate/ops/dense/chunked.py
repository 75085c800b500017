"""Backend of PLuG attention that works in chunks of queries, so that no whole N x M map is in memory.

The gradient in ``rows.py`` takes less time and memory than chunks under autograd. Dropout, a learnt bias, any other
modulation than a module, and torch.compile need the latter.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from ..autocast import autocast_dtype, without_autocast
from ..tracing import is_compiling
from . import reference
from .pairs import Modulation, Pairs
from .rows import AttentionInChunks, rows_of
from .softmax import BY_TORCH, Softmax

# Elements of (B, H, rows, M) that are in memory at a time. On a CPU they fit into its cache. On a GPU larger chunks
# need fewer launches.
CHUNK = 1 << 21
CHUNK_ON_GPU = 1 << 26


def attend(pairs: Pairs, softmax: Softmax = BY_TORCH) -> Tensor:
    """Compute PLuG attention in chunks of queries, with this softmax."""
    query = pairs.query
    modulation = pairs.modulation
    batch, heads, rows, _ = query.shape
    step = max(1, chunk_on(query.device) // max(1, batch * heads * pairs.key.shape[-2]))
    if rows <= step:
        return reference.attend(pairs)
    if is_compiling() or not isinstance(modulation, nn.Module):
        return _checkpointed(step, pairs, modulation)
    # Until the backward pass, functional_call and FSDP may have put other tensors into the module.
    bound = _tensors_of(modulation)
    learnt_bias = pairs.bias is not None and pairs.bias.requires_grad
    if pairs.dropout or learnt_bias:
        return _checkpointed(step, pairs, partial(functional_call, modulation, bound))
    device_type = query.device.type
    narrow = autocast_dtype(device_type)
    if narrow is not None:
        names = ('query', 'key', 'value', 'gate_query', 'gate_key')
        pairs = pairs._replace(**{name: getattr(pairs, name).to(narrow) for name in names})
    with without_autocast(device_type):
        return AttentionInChunks.apply(step, softmax, list(bound), *pairs, *bound.values())


def chunk_on(device: torch.device) -> int:
    """Return how many elements of the N x M maps may be in memory at a time on a device."""
    return CHUNK if device.type == 'cpu' else CHUNK_ON_GPU


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters by name or, under FSDP, the plain tensors that replace them."""
    found: dict[str, Tensor] = {}
    for path, part in module.named_modules():
        for name, value in (part._parameters | vars(part)).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                found[f'{path}.{name}'.lstrip('.')] = value
    return found


def _checkpointed(step: int, pairs: Pairs, modulation: Modulation) -> Tensor:
    """Compute PLuG attention in chunks of ``step`` queries under autograd with activation checkpointing."""
    columns = (pairs.key, pairs.value, pairs.gate_key)
    # Autograd adds the gradients of the chunks in the dtype of these tensors, which has to have 32 bits.
    wide = [x.float() if x.dtype.itemsize < 4 else x for x in columns]

    def attend_rows(query: Tensor, gate_query: Tensor, bias: Tensor | None, *wide: Tensor) -> Tensor:
        key, value, gate_key = (x.to(like.dtype) for x, like in zip(wide, columns, strict=True))
        rows = Pairs(
            query, key, value, gate_query, gate_key, modulation, bias, pairs.residual, pairs.position, pairs.dropout
        )
        return reference.attend(rows)

    outputs = []
    for start in range(0, pairs.query.shape[-2], step):
        rows = slice(start, start + step)
        inputs: Any = (pairs.query[:, :, rows], pairs.gate_query[:, :, rows], rows_of(pairs.bias, rows), *wide)
        if torch.is_grad_enabled():
            outputs.append(checkpoint(attend_rows, *inputs, use_reentrant=False, preserve_rng_state=pairs.dropout > 0))
        else:
            outputs.append(attend_rows(*inputs))
    return torch.cat(outputs, -2)
