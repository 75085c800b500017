"""What property-based tests share: tensors of any shape, layout in memory, dtype and size, and one way to run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import TORCH
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

every_number_of_examples = pytest.mark.parametrize(
    'examples', [pytest.param(25, id='few'), pytest.param(500, id='many', marks=pytest.mark.slow)]
)
# dtype: tolerance of an output of numbers around 1
DTYPES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
if TORCH < (2, 2):  # no matrix product of float16 on the CPU
    del DTYPES[torch.float16]
MEMORY = ('contiguous', 'reversed', 'strided', 'offset', 'expanded')


def hold(examples: int, check: Callable[..., None], **drawn: st.SearchStrategy[Any]) -> None:
    """Run ``check`` on drawn arguments, the same ones in every run."""
    same = settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    given(**drawn)(same(check))()


def numbers(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return float64 numbers: ``normal``, ``positive``, ``share`` (0 to 1), ``zeros``, ``ones`` or ``large`` (100)."""
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    forms: dict[str, Callable[[Tensor], Tensor]] = {
        'normal': lambda x: x,
        'positive': lambda x: x.abs(),
        'share': lambda x: x.sigmoid(),
        'zeros': torch.zeros_like,
        'ones': torch.ones_like,
        'large': lambda x: x.sign() * 100,
    }
    return forms[kind](x)


def stored(x: Tensor, memory: str) -> Tensor:
    """Return ``x`` in another memory layout, with NaN beside what belongs to it; ``expanded`` repeats an entry."""
    if memory == 'reversed':
        axes = tuple(reversed(range(x.dim())))
        return x.permute(axes).contiguous().permute(axes)
    if memory == 'strided':
        wide = x.new_full((*x.shape, 2), float('nan'))
        wide[..., 0] = x
        return wide[..., 0]
    if memory == 'offset':
        return torch.cat([x.new_full((3,), float('nan')), x.flatten(), x.new_full((3,), float('nan'))])[3:-3].view(
            x.shape
        )
    if memory == 'expanded' and x.dim() and x.shape[0] > 1:
        return x[:1].expand(x.shape)
    return x


SPOILT = ('longer', 'flatter', 'deeper', 'integer', 'number')


def spoil(x: Tensor, how: str, axis: int) -> Any:
    """Return ``x`` with a longer axis, one axis less or more, as integers, or something that is no tensor."""
    if how == 'longer' and x.dim():
        axis %= x.dim()
        shape = list(x.shape)
        shape[axis] += 1
        return x.new_zeros(shape)
    if how == 'flatter' and x.dim():
        return x.flatten(0, 1) if x.dim() > 1 else x.sum()
    if how == 'integer':
        return x.long()
    return 1.0 if how == 'number' else x[None]
