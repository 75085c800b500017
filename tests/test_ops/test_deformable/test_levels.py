"""Sizes of levels as numbers: one wait for the device a forward pass, and tensors that are made once."""

from __future__ import annotations

import gc
from typing import Any

import torch
from helpers.samplings import SMALL, attend, make
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from mmgate.ops.deformable import levels
from mmgate.ops.deformable.levels import levels_on, numbers_of

NUMBERS = ([[3, 5], [1, 1], [2, 1]], [0, 15, 16])


class Waits(TorchFunctionMode):
    """Counts where numbers are read."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.__name__ == 'tolist'
        return func(*args, **(kwargs or {}))


def test_layers_of_a_forward_pass_wait_once() -> None:
    """And those that share a list of sizes never, of which the tensors are made once."""
    _, shapes, starts, *_ = make()
    levels._cached.cache_clear()
    with FakeTensorMode():
        levels_on(shapes.device, SMALL)  # whose tensors are not kept
    with torch.inference_mode():
        made = levels_on(shapes.device, SMALL)
    assert torch.equal(made[0], shapes) and torch.equal(made[1], starts)
    assert not made[0].is_inference(), 'they can be trained with'
    for sizes, waits in (((shapes, starts), 1), (made, 0)):
        with Waits() as found:
            assert numbers_of(*sizes) == numbers_of(*sizes) == NUMBERS
        assert found.count == waits
    assert levels_on(shapes.device, [list(size) for size in SMALL])[0] is made[0]


def test_changed_tensors_are_read_again() -> None:
    """Those of inference mode have no version, by which a change would be noticed, and are read each time."""
    for inference in (False, True):
        with torch.inference_mode(inference):
            given = make()
            attend(given, 'grid_sample')
            given.spatial_shapes[0] = torch.tensor([5, 3])
            torch.testing.assert_close(attend(given, 'grid_sample'), attend(given, 'torch'))


def test_numbers_go_with_their_tensor() -> None:
    _, shapes, starts, *_ = make()
    before = len(levels._numbers)
    numbers_of(shapes, starts)
    assert len(levels._numbers) == before + 2
    del shapes, starts, _
    gc.collect()
    assert len(levels._numbers) == before
