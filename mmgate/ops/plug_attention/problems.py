"""What measuring needs of PLuG attention: the class of a call, and a small call of its variant."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..dispatch import Problems
from .reference import Modulation

ROWS, COLUMNS = 70, 100  # no multiples of a kernel's blocks, and more than one


def _shape_class(
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
) -> tuple[Any, ...]:
    """Sizes that vary with the image by their power of two, all others as they are."""
    batch, heads, rows, dim = query.shape
    sizes = f'b{batch.bit_length()} h{heads} n{rows.bit_length()} m{key.shape[2].bit_length()} d{dim} v{value.shape[3]}'
    gate = f'g{gate_query.shape[1]}x{gate_query.shape[3]}'
    kind = getattr(modulation, 'variant', ''), getattr(modulation, 'activation', '')
    of_bias = 'unbiased' if bias is None else f'bias{"".join("1" if n == 1 else "n" for n in bias.shape)}'
    learnt = bias is not None and bias.requires_grad
    return sizes, gate, type(modulation).__name__, *kind, of_bias, learnt, residual, position, dropout > 0


def _small(
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
) -> tuple[Any, ...]:
    """Without dropout, under which nothing could be compared; a constant bias has masked keys."""
    generator = torch.Generator().manual_seed(0)
    batch, heads = min(2, query.shape[0]), min(4 - query.shape[1] % 2, query.shape[1])  # odd or even as the call's
    gates = 1 if gate_query.shape[1] == 1 else heads
    rows, columns = min(ROWS, query.shape[2]), min(COLUMNS, key.shape[2])

    def like(original: Tensor, *shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.to(original.dtype).requires_grad_(original.requires_grad)

    of_bias = None
    if bias is not None:
        full = (batch, heads, rows, columns)
        of_bias = like(bias, *(1 if n == 1 else m for n, m in zip(bias.shape, full, strict=True)))
        if not bias.requires_grad:
            of_bias[..., 1::5] = -torch.inf
    return (
        like(query, batch, heads, rows, query.shape[3]),
        like(key, batch, heads, columns, key.shape[3]),
        like(value, batch, heads, columns, value.shape[3]),
        like(gate_query, batch, gates, rows, gate_query.shape[3]),
        like(gate_key, batch, gates, columns, gate_key.shape[3]),
        modulation,
        of_bias,
        residual,
        position,
        0.0,
    )


def _elements(query: Tensor, key: Tensor, *_: Any) -> int:
    return query.shape[:3].numel() * key.shape[2]


PROBLEMS = Problems(_shape_class, _small, _elements)
