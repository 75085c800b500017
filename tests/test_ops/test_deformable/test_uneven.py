"""Levels with different numbers of sampling points: gradients, graphs, filling up and refusals.

That every backend solves random problems of that kind is a test of the operator.
"""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

import pytest
import torch
from conftest import assert_same, needs_native, one_graph, values_and_gradients
from torch import Tensor

from mmgate.ops import ms_deform_attn
from mmgate.ops.deformable import reference
from mmgate.ops.deformable.samples import Samples, padded_levels, weighted
from mmgate.ops.deformable.uneven import check_points, points_of_levels

NATIVE = pytest.param('native', marks=needs_native)
COUNTS = (3, 6, 3)  # as D-FINE and DEIM are published
LEVELS = [(4, 6), (2, 3), (1, 2)]
GATES = {'none': None, 'sample': (2, 12), 'sample_of_all_heads': (1, 12), 'head': (2, 1), 'one': ()}


def make(gate: tuple[int, ...] | None = None, columns: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return value, shapes, starts, points, logits, gate and reference points; the last two may be missing."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)

    shapes = torch.tensor(LEVELS)
    areas = shapes.prod(1)
    points = rand(2, 4, 2, 12, 2) * 1.4 - 0.2
    if columns:
        points = (points - 0.5) * 5
    inputs = [rand(2, 32, 2, 4) - 0.5, shapes, areas.cumsum(0) - areas, points, (rand(2, 4, 2, 12) - 0.5) * 4]
    if gate is not None:
        inputs.append(rand(*((2, 4) if gate else ()), *gate) - 0.5)
    if columns:
        inputs.append(rand(2, 4, 3, columns) * 0.8 + 0.1)
    return inputs


def attend(gate: Any, columns: int, **options: Any) -> Any:
    """Return the operator as a function of :func:`make`'s tensors."""

    def call(value: Tensor, shapes: Tensor, starts: Tensor, points: Tensor, logits: Tensor, *others: Tensor) -> Tensor:
        rest = list(others)
        given = None if gate is None else rest.pop(0)
        around = rest.pop(0) if columns else None
        return ms_deform_attn(
            value, shapes, starts, points, logits, given, reference_points=around, num_points=COUNTS, **options
        )

    return call


@pytest.mark.parametrize('backend', ['torch', 'grid_sample', NATIVE])
def test_every_gradient_passes_gradcheck(backend: str) -> None:
    """Each kind of gate, each kind of points and each pair of options, which take turns."""
    options = cycle(product(['pre_softmax', 'post_softmax'], [True, False]))
    for gate, columns, (position, residual) in zip(GATES.values(), cycle([0, 2, 4]), options, strict=False):
        inputs = [x.requires_grad_() if x.is_floating_point() else x for x in make(gate, columns)]
        call = attend(gate, columns, position=position, residual=residual, backend=backend)
        assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


def test_levels_that_are_filled_up_change_nothing() -> None:
    """As mmcv's operator and other packages get them; gradients are finite, and none goes to what is not there."""
    value, shapes, starts, points, logits, gate, around = make((2, 12), 4)

    def filled_up(value: Tensor, points: Tensor, logits: Tensor, gate: Tensor) -> Tensor:
        samples = Samples(
            value, shapes, starts, points, logits, gate, reference_points=around, num_points=COUNTS
        )  # fmt: skip
        return reference.sum_samples(padded_levels(weighted(samples)))

    def exact(value: Tensor, points: Tensor, logits: Tensor, gate: Tensor) -> Tensor:
        return attend(True, 4, backend='torch')(value, shapes, starts, points, logits, gate, around)

    tensors = [value, points, logits, gate]
    actual = values_and_gradients(filled_up, tensors, range(4))
    assert_same(actual, values_and_gradients(exact, tensors, range(4)), rtol=1e-12, atol=1e-12)


@one_graph
@pytest.mark.parametrize('backend', ['auto', NATIVE])
def test_compiles_without_a_graph_break(backend: str) -> None:
    inputs = make((2, 12), 4, dtype=torch.float32)
    call = attend(True, 4, backend=backend)
    compiled = torch.compile(call, fullgraph=True, backend='aot_eager')
    expected = values_and_gradients(call, inputs, (0, 3, 4, 5, 6))
    assert_same(values_and_gradients(compiled, inputs, (0, 3, 4, 5, 6)), expected, rtol=1e-4, atol=1e-5)


@one_graph
@needs_native
@pytest.mark.parametrize('gate', [(2, 12), (2, 1)], ids=str)
def test_the_registered_operator_passes_opcheck(gate: tuple[int, ...]) -> None:
    inputs = make(gate, 4, dtype=torch.float32)
    *tensors, around = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]
    call = (*tensors, True, 'pre_softmax', around, list(COUNTS))
    torch.library.opcheck(torch.ops.mmgate.ms_deform_attn_native.default, call)


BAD: dict[str, tuple[Any, dict[int, Tensor], str]] = {
    'length': ([3, 9], {}, r'num_points=\[3, 9\] has 2 numbers for 3 levels; give one for each'),
    'sum': ([3, 6, 4], {}, r'logits must be \(B, Q, H, 13\), got \(2, 4, 2, 12\)'),
    'zero': ([3, 0, 9], {}, r'num_points=\[3, 0, 9\] must have a positive integer for each level'),
    'bool': ([True, 9, 2], {}, r'\[True, 9, 2\] must have a positive integer'),
    'number': (4, {}, 'num_points=4 must be a list of 3 positive integers'),
    'fraction': ([3.0, 6.0, 3.0], {}, r'\[3.0, 6.0, 3.0\] must have a positive integer'),
    'two_axes': (COUNTS, {4: torch.zeros(2, 4, 2, 3, 4)}, r'logits must be \(B, Q, H, 12\), got \(2, 4, 2, 3, 4\)'),
    'gate_of_levels': (COUNTS, {5: torch.zeros(2, 4, 2, 3)}, r'gate must be .*12\|1\), got \(2, 4, 2, 3\)'),
    'locations': (COUNTS, {3: torch.zeros(2, 4, 2, 11, 2)}, r'sampling_locations must be \(B, Q, H, 12, 2\), got'),
}  # fmt: skip


@pytest.mark.parametrize('counts, changed, message', BAD.values(), ids=BAD)
def test_numbers_that_do_not_fit_are_named(counts: Any, changed: dict[int, Tensor], message: str) -> None:
    inputs = [changed.get(i, x) for i, x in enumerate(make((2, 12)))]
    with pytest.raises(ValueError, match=message):
        ms_deform_attn(*inputs, num_points=counts)


def test_one_number_stays_one_and_equal_numbers_become_one() -> None:
    assert points_of_levels(4, 3) == 4 and points_of_levels([4, 4, 4], 3) == 4
    assert points_of_levels([3, 6, 3], 3) == (3, 6, 3) == check_points([3, 6, 3], 3)
    for count in (0, -1, True):
        with pytest.raises(ValueError, match=f'num_points={count} must be a positive integer'):
            points_of_levels(count, 3)
