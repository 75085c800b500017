"""Sizes of levels as numbers: one wait for the device a forward pass, and tensors that are made once."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import torch
from helpers.samplings import make, run
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from mmgate.ops.deformable import grid_sample, levels
from mmgate.ops.deformable.levels import levels_on, numbers_of
from mmgate.ops.deformable.samples import WeightedSamples

SIZES = [(3, 5), (1, 1), (2, 1)]
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
    shapes = torch.tensor(SIZES)
    areas = shapes.prod(1)
    return shapes, areas.cumsum(0) - areas


def test_a_second_call_reads_no_tensor() -> None:
    shapes, starts = tensors()
    with Calls() as calls:
        for _ in range(3):
            assert numbers_of(shapes, starts) == ([[3, 5], [1, 1], [2, 1]], [0, 15, 16])
    assert calls.counts['tolist'] == 1


def test_layers_of_a_forward_pass_wait_once() -> None:
    value, shapes, starts, locations, logits, _, _ = make()
    with Calls() as calls:
        for factor in (1, 2, 3):
            grid_sample.sum_samples(WeightedSamples(factor * value, shapes, starts, locations, logits.softmax(-1)))
    assert calls.counts['grid_sample'] == 3 * len(SIZES)
    assert calls.counts['tolist'] == 1


def test_changed_tensors_are_read_again() -> None:
    shapes, starts = tensors()
    numbers_of(shapes, starts)
    shapes[0] = torch.tensor([5, 3])
    assert numbers_of(shapes, starts)[0] == [[5, 3], [1, 1], [2, 1]]
    starts += 1
    assert numbers_of(shapes, starts)[1] == [1, 16, 17]


def test_tensors_of_inference_mode_are_read_each_time() -> None:
    """They have no version, by which a change would be noticed."""
    with torch.inference_mode():
        shapes, starts = tensors()
        numbers_of(shapes, starts)
        shapes[0] = torch.tensor([5, 3])
        assert numbers_of(shapes, starts)[0][0] == [5, 3]


def test_numbers_go_with_their_tensor() -> None:
    shapes, starts = tensors()
    before = len(levels._numbers)
    numbers_of(shapes, starts)
    assert len(levels._numbers) == before + 2
    del shapes, starts
    gc.collect()
    assert len(levels._numbers) == before


def test_tensors_of_a_list_are_made_once_and_known() -> None:
    shapes, starts = levels_on(CPU, SIZES)
    assert torch.equal(shapes, tensors()[0])
    assert torch.equal(starts, tensors()[1])
    with Calls() as calls:
        again = levels_on(CPU, [list(size) for size in SIZES])
        assert numbers_of(*again) == ([[3, 5], [1, 1], [2, 1]], [0, 15, 16])
    assert again[0] is shapes
    assert again[1] is starts
    assert not calls.counts['tolist']


def test_tensors_that_inference_made_can_be_trained_with() -> None:
    levels._cached.cache_clear()
    with torch.inference_mode():
        shapes, starts = levels_on(CPU, SIZES)
    assert not shapes.is_inference()
    inputs = make()
    inputs[0].requires_grad_()
    output = run('grid_sample')(inputs[0], shapes, starts, *inputs[3:])
    output.sum().backward()
    assert inputs[0].grad is not None


def test_fake_tensors_are_not_kept() -> None:
    levels._cached.cache_clear()
    with FakeTensorMode():
        levels_on(CPU, SIZES)
    shapes, _ = levels_on(CPU, SIZES)
    assert shapes.tolist() == [list(size) for size in SIZES]
