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

from ..autocast import autocast_dtype, without_autocast
from ..tracing import is_compiling
from . import reference
from .reference import Modulation
from .rows import GatedRows, part_of

# Elements of (B, H, rows, M) that exist at a time: as many as a CPU's cache holds; on a GPU the launches count.
CHUNK = 1 << 21
CHUNK_ON_GPU = 1 << 26


def attend(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate_query: Tensor,
    gate_key: Tensor,
    modulation: Modulation,
    bias: Tensor | None,
    residual: bool,
    position: str,
    dropout: float,
) -> Tensor:
    """Attend in chunks of rows; the arguments are those of :func:`.plug_attention`, the bias with four axes."""
    options: dict[str, Any] = dict(residual=residual, position=position, dropout=dropout)
    batch, heads, rows, _ = query.shape
    chunk = chunk_on(query.device)
    step = max(1, chunk // max(1, batch * heads * key.shape[-2]))
    tensors = (query, key, value, gate_query, gate_key)
    if rows <= step:
        return reference.attend(
            query=query,
            key=key,
            value=value,
            gate_query=gate_query,
            gate_key=gate_key,
            modulation=modulation,
            bias=bias,
            **options,
        )
    if is_compiling() or not isinstance(modulation, nn.Module):
        return _checkpointed(step, *tensors, modulation, bias, **options)
    # By the backward pass functional_call and FSDP have put other tensors into the module.
    module = modulation
    bound = _tensors_of(module)
    learnt_bias = bias is not None and bias.requires_grad
    if dropout or learnt_bias:
        return _checkpointed(step, *tensors, partial(functional_call, module, bound), bias, **options)
    device_type = query.device.type
    narrow = autocast_dtype(device_type)
    if narrow is not None:
        query, key, value, gate_query, gate_key = (x.to(narrow) for x in tensors)

    def factor(gate_query: Tensor, gate_key: Tensor, *parameters: Tensor) -> Tensor:
        of_parameters = partial(functional_call, module, dict(zip(bound, parameters, strict=True)))
        return reference.gate_factor(gate_query, gate_key, of_parameters, residual)

    with without_autocast(device_type):
        post_softmax = position == 'post_softmax'
        return GatedRows.apply(
            step, post_softmax, factor, bias, query, key, value, gate_query, gate_key, *bound.values()
        )


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


def _checkpointed(
    step: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate_query: Tensor,
    gate_key: Tensor,
    modulation: Modulation,
    bias: Tensor | None,
    *,
    residual: bool,
    position: str,
    dropout: float,
) -> Tensor:
    """Attend in chunks under autograd, for dropout, a learnt bias and any modulation, which have no other gradient."""
    columns = (key, value, gate_key)
    # in 32 bits, as the sums of the chunks' gradients have to be
    wide = [x.float() if x.dtype.itemsize < 4 else x for x in columns]

    def attend_rows(query: Tensor, gate_query: Tensor, bias: Tensor | None, *wide: Tensor) -> Tensor:
        key, value, gate_key = (x.to(like.dtype) for x, like in zip(wide, columns, strict=True))
        return reference.attend(
            query=query,
            key=key,
            value=value,
            gate_query=gate_query,
            gate_key=gate_key,
            modulation=modulation,
            bias=bias,
            residual=residual,
            position=position,
            dropout=dropout,
        )

    outputs = []
    for start in range(0, query.shape[-2], step):
        part = slice(start, start + step)
        inputs: Any = (query[:, :, part], gate_query[:, :, part], part_of(bias, part), *wide)
        if torch.is_grad_enabled():
            outputs.append(checkpoint(attend_rows, *inputs, use_reentrant=False, preserve_rng_state=dropout > 0))
        else:
            outputs.append(attend_rows(*inputs))
    return torch.cat(outputs, -2)
