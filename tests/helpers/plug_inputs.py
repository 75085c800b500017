"""Inputs of PLuG's operator."""

from __future__ import annotations

import torch
from torch import Tensor

SHAPES = dict(query=(2, 4, 5, 8), key=(2, 4, 6, 8), value=(2, 4, 6, 8), gate_query=(2, 1, 5, 3), gate_key=(2, 1, 6, 3))
PER_HEAD = dict(gate_query=(2, 4, 5, 3), gate_key=(2, 4, 6, 3))


def make(dtype: torch.dtype = torch.float32, **changed: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.randn(shape, dtype=dtype) for name, shape in {**SHAPES, **changed}.items()}
