"""PLuG attention in chunks of query rows, formed anew in the backward pass, so that no whole map is in memory.

What has a gradient of its own (``rows.py``) takes less time and memory than the chunks under autograd.
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
from .rows import GatedRows, part_of

# Elements of (B, H, rows, M) that exist at a time: as many as a CPU's cache holds; on a GPU the launches count.
CHUNK = 1 << 21
CHUNK_ON_GPU = 1 << 26


def attend(*arguments: Any) -> Tensor:
    """Attend; the arguments are those of :class:`Arguments`."""
    call = Arguments(*arguments)
    batch, heads, rows, _ = call.query.shape
    chunk = chunk_on(call.query.device)
    step = max(1, chunk // max(1, batch * heads * call.key.shape[-2]))
    if rows <= step:
        return reference.attend(*call)
    learnt_bias = call.bias is not None and call.bias.requires_grad
    if is_compiling() or not isinstance(call.modulation, nn.Module):
        return _checkpointed(step, call)
    # by the backward pass functional_call and FSDP have put other tensors into the module
    module, bound = call.modulation, _tensors_of(call.modulation)
    if call.dropout or learnt_bias:
        return _checkpointed(step, call._replace(modulation=partial(functional_call, module, bound)))
    tensors: tuple[Tensor, ...] = call[:5]
    narrow = autocast_dtype(call.query.device.type)
    if narrow is not None:
        tensors = tuple(x.to(narrow) for x in tensors)

    def factor(gate_query: Tensor, gate_key: Tensor, *parameters: Tensor) -> Tensor:
        modulation = partial(functional_call, module, dict(zip(bound, parameters, strict=True)))
        return reference.gate_factor(gate_query, gate_key, modulation, call.residual)

    with without_autocast(call.query.device.type):
        options = step, call.position == 'post_softmax', factor, call.bias
        return GatedRows.apply(*options, *tensors, *bound.values())


def chunk_on(device: torch.device) -> int:
    """Return how many elements of the map exist at a time on a device."""
    return CHUNK if device.type == 'cpu' else CHUNK_ON_GPU


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters, and what FSDP puts in their places, which are plain attributes."""
    return {
        f'{path}.{name}'.lstrip('.'): x
        for path, part in module.named_modules()
        for name, x in (part._parameters | vars(part)).items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }


def _checkpointed(step: int, call: Arguments) -> Tensor:
    """The chunks under autograd, for what has no gradient of its own: dropout, a learnt bias, any modulation."""
    columns = call.key, call.value, call.gate_key
    # in 32 bits, as the sums of the chunks' gradients have to be
    wide = [x.float() if x.dtype.itemsize < 4 else x for x in columns]

    def attend_rows(query: Tensor, gate_query: Tensor, bias: Tensor | None, *wide: Tensor) -> Tensor:
        key, value, gate_key = (x.to(like.dtype) for x, like in zip(wide, columns, strict=True))
        return reference.attend(query, key, value, gate_query, gate_key, call.modulation, bias, *call[7:])

    outputs = []
    for part in (slice(start, start + step) for start in range(0, call.query.shape[-2], step)):
        inputs: Any = call.query[:, :, part], call.gate_query[:, :, part], part_of(call.bias, part), *wide
        if torch.is_grad_enabled():
            outputs.append(checkpoint(attend_rows, *inputs, use_reentrant=False, preserve_rng_state=call.dropout > 0))
        else:
            outputs.append(attend_rows(*inputs))
    return torch.cat(outputs, -2)
