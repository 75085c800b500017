"""Sizes of levels as numbers: one wait for the device a forward pass, and tensors that are made once."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import torch
from helpers.samplings import SMALL, make
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from mmgate.ops.deformable import grid_sample, levels
from mmgate.ops.deformable.levels import levels_on, numbers_of
from mmgate.ops.deformable.samples import WeightedSamples

CPU = torch.device('cpu')


class Calls(TorchFunctionMode):
    """Counts calls of torch's functions by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def tensors() -> tuple[Tensor, Tensor]:
    shapes = torch.tensor(SMALL)
    areas = shapes.prod(1)
    return shapes, areas.cumsum(0) - areas


def test_layers_of_a_forward_pass_wait_once() -> None:
    value, shapes, starts, locations, logits, *_ = make()
    with Calls() as calls:
        for factor in (1, 2, 3):
            grid_sample.sum_samples(WeightedSamples(factor * value, shapes, starts, locations, logits.softmax(-1)))
    assert calls.counts['grid_sample'] == 3 * len(SMALL)
    assert calls.counts['tolist'] == 1


def test_changed_tensors_are_read_again() -> None:
    """Those of inference mode have no version, by which a change would be noticed, and are read each time."""
    for inference in (False, True):
        with torch.inference_mode(inference):
            shapes, starts = tensors()
            assert numbers_of(shapes, starts) == ([[3, 5], [1, 1], [2, 1]], [0, 15, 16])
            shapes[0] = torch.tensor([5, 3])
            starts += 1
            assert numbers_of(shapes, starts) == ([[5, 3], [1, 1], [2, 1]], [1, 16, 17])


def test_numbers_go_with_their_tensor() -> None:
    shapes, starts = tensors()
    before = len(levels._numbers)
    numbers_of(shapes, starts)
    assert len(levels._numbers) == before + 2
    del shapes, starts
    gc.collect()
    assert len(levels._numbers) == before


def test_tensors_of_a_list_are_made_once_and_known() -> None:
    """Not those of a pass on fake tensors; and those of inference mode can be trained with."""
    levels._cached.cache_clear()
    with FakeTensorMode():
        levels_on(CPU, SMALL)
    with torch.inference_mode():
        shapes, starts = levels_on(CPU, SMALL)
    for found, expected in zip((shapes, starts), tensors(), strict=True):
        assert torch.equal(found, expected) and not found.is_inference()
    with Calls() as calls:
        again = levels_on(CPU, [list(size) for size in SMALL])
        assert numbers_of(*again) == ([[3, 5], [1, 1], [2, 1]], [0, 15, 16])
    assert again[0] is shapes and again[1] is starts and not calls.counts['tolist']
