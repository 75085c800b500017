"""PLuG attention in chunks of query rows, which the backward pass computes again, so that no whole map is in memory.

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

from ..library import autocast_dtype, is_compiling, without_autocast
from . import reference
from .reference import Arguments
from .rows import GatedRows, rows_of

# Elements of (B, H, rows, M) that are in memory at a time. On a CPU they fit into its cache. On a GPU larger chunks
# need fewer launches.
CHUNK = 1 << 21
CHUNK_ON_GPU = 1 << 26


def attend(*arguments: Any) -> Tensor:
    """Attend in chunks of rows; the arguments are those of :class:`Arguments`."""
    call = Arguments(*arguments)
    batch, heads, rows, _ = call.query.shape
    chunk = chunk_on(call.query.device)
    step = max(1, chunk // max(1, batch * heads * call.key.shape[-2]))
    if rows <= step:
        return reference.attend(*call)
    learnt_bias = call.bias is not None and call.bias.requires_grad
    if is_compiling() or not isinstance(call.modulation, nn.Module):
        return _checkpointed(step, call)
    # Until the backward pass, functional_call and FSDP may have put other tensors into the module.
    module = call.modulation
    bound = _tensors_of(module)
    if call.dropout or learnt_bias:
        return _checkpointed(step, call._replace(modulation=partial(functional_call, module, bound)))
    tensors: tuple[Tensor, ...] = call[:5]
    narrow = autocast_dtype(call.query.device.type)
    if narrow is not None:
        tensors = tuple(x.to(narrow) for x in tensors)

    def factor(gate_query: Tensor, gate_key: Tensor, *parameters: Tensor) -> Tensor:
        modulation = partial(functional_call, module, dict(zip(bound, parameters, strict=True)))
        return reference.gate_factor(gate_query, gate_key, modulation, call.residual)

    post_softmax = call.position == 'post_softmax'
    with without_autocast(call.query.device.type):
        return GatedRows.apply(step, post_softmax, factor, call.bias, *tensors, *bound.values())


def chunk_on(device: torch.device) -> int:
    """Return the number of elements of the map that are in memory at a time on a device."""
    return CHUNK if device.type == 'cpu' else CHUNK_ON_GPU


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a module by name, or the plain attributes by which FSDP replaces them."""
    found: dict[str, Tensor] = {}
    for path, part in module.named_modules():
        for name, value in (part._parameters | vars(part)).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                found[f'{path}.{name}'.lstrip('.')] = value
    return found


def _checkpointed(step: int, call: Arguments) -> Tensor:
    """Attend in chunks of ``step`` rows under autograd, which recomputes a chunk for its gradient."""
    columns = (call.key, call.value, call.gate_key)
    # Autograd adds the gradients of the chunks in the dtype of these tensors, which has to have 32 bits.
    wide = [x.float() if x.dtype.itemsize < 4 else x for x in columns]

    def attend_rows(query: Tensor, gate_query: Tensor, bias: Tensor | None, *wide: Tensor) -> Tensor:
        key, value, gate_key = (x.to(like.dtype) for x, like in zip(wide, columns, strict=True))
        rest = (call.residual, call.position, call.dropout)
        return reference.attend(query, key, value, gate_query, gate_key, call.modulation, bias, *rest)

    outputs = []
    for start in range(0, call.query.shape[-2], step):
        rows = slice(start, start + step)
        query = call.query[:, :, rows]
        gate_query = call.gate_query[:, :, rows]
        bias = rows_of(call.bias, rows)
        if torch.is_grad_enabled():
            options: dict[str, Any] = dict(use_reentrant=False, preserve_rng_state=call.dropout > 0)
            outputs.append(checkpoint(attend_rows, query, gate_query, bias, *wide, **options))
        else:
            outputs.append(attend_rows(query, gate_query, bias, *wide))
    return torch.cat(outputs, -2)
