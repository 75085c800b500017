"""Levels with different numbers of sampling points: every backend against an equation, refusals, graphs."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

import pytest
import torch
from conftest import assert_same, needs_native, one_graph, values_and_gradients
from helpers.samplings import by_backend, compare, exactly, unevenly
from torch import Tensor

from mmgate.gates import MultiScaleDeformableAttention
from mmgate.ops import ms_deform_attn
from mmgate.ops.deformable import reference
from mmgate.ops.deformable.samples import Samples, padded_levels, weighted
from mmgate.ops.deformable.uneven import check_points, points_of_levels

NATIVE = pytest.param('native', marks=needs_native)
BACKENDS = ['torch', 'grid_sample', NATIVE]
COUNTS = (3, 6, 3)  # as D-FINE and DEIM are published
LEVELS = [(4, 6), (2, 3), (1, 2)]
GATES = {'none': None, 'sample': (2, 12), 'sample_of_all_heads': (1, 12), 'head': (2, 1), 'one': ()}


def make(
    gate: tuple[int, ...] | None = None, columns: int = 0, queries: int = 4, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Return value, shapes, starts, points, logits, gate and reference points; the last two may be missing."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)

    shapes = torch.tensor(LEVELS)
    areas = shapes.prod(1)
    points = rand(2, queries, 2, 12, 2) * 1.4 - 0.2
    if columns:
        points = (points - 0.5) * 5
    inputs = [rand(2, 32, 2, 4) - 0.5, shapes, areas.cumsum(0) - areas, points, (rand(2, queries, 2, 12) - 0.5) * 4]
    if gate is not None:
        inputs.append(rand(*((2, queries) if gate else ()), *gate) - 0.5)
    if columns:
        inputs.append(rand(2, queries, 3, columns) * 0.8 + 0.1)
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


@pytest.mark.parametrize('backend', BACKENDS)
def test_random_problems_equal_a_float64_program(backend: str) -> None:
    problems = [(seed, unevenly(seed)) for seed in range(300)]
    uneven = [(seed, given) for seed, given in problems if len(set(given.num_points or ())) > 1]
    assert len(uneven) > 40
    for seed, given in uneven:
        compare(f'problem {seed}', by_backend(given, backend, torch.float64), exactly(given), 1e-9)
        compare(f'problem {seed} in float32', by_backend(given, backend), exactly(given), 1e-4)


@pytest.mark.parametrize('backend', BACKENDS)
def test_every_gradient_passes_gradcheck(backend: str) -> None:
    """Each kind of gate, each kind of points and each pair of options, which take turns."""
    options = cycle(product(['pre_softmax', 'post_softmax'], [True, False]))
    for gate, columns, (position, residual) in zip(GATES.values(), cycle([0, 2, 4]), options, strict=False):
        passes_gradcheck(backend, gate, columns, position, residual)


def passes_gradcheck(backend: str, gate: tuple[int, ...] | None, columns: int, position: str, residual: bool) -> None:
    inputs = [x.requires_grad_() if x.is_floating_point() else x for x in make(gate, columns)]
    call = attend(gate, columns, position=position, residual=residual, backend=backend)
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize('queries', [4, 70], ids=['few', 'many'])
@pytest.mark.parametrize('columns', [0, 2, 4], ids=['locations', 'points', 'boxes'])
@pytest.mark.parametrize('backend', BACKENDS)
def test_even_numbers_give_what_two_axes_give(backend: str, columns: int, queries: int) -> None:
    """Output and gradients; twelve points are four of each level."""
    value, shapes, starts, points, logits, gate, *around = make((2, 12), columns, queries)
    points_of = dict(reference_points=around[0]) if columns else {}
    expected = values_and_gradients(
        lambda v, p, a, g: ms_deform_attn(
            v, shapes, starts, p.unflatten(3, (3, 4)), a.unflatten(3, (3, 4)), g.unflatten(3, (3, 4)),
            backend=backend, **points_of,
        ),
        [value, points, logits, gate], range(4),
    )  # fmt: skip
    actual = values_and_gradients(
        lambda v, p, a, g: ms_deform_attn(
            v, shapes, starts, p, a, g, num_points=[4, 4, 4], backend=backend, **points_of
        ),
        [value, points, logits, gate],
        range(4),
    )
    assert_same(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('columns', [0, 4], ids=['locations', 'boxes'])
def test_levels_that_are_filled_up_change_nothing(columns: int) -> None:
    """As mmcv's operator and other packages get them; gradients are finite, and none goes to what is not there."""
    inputs = make((2, 12), columns)
    value, shapes, starts, points, logits, gate, *around = inputs

    def filled_up(value: Tensor, points: Tensor, logits: Tensor, gate: Tensor) -> Tensor:
        samples = Samples(
            value, shapes, starts, points, logits, gate,
            reference_points=around[0] if columns else None, num_points=COUNTS,
        )  # fmt: skip
        return reference.sum_samples(padded_levels(weighted(samples)))

    def exact(value: Tensor, points: Tensor, logits: Tensor, gate: Tensor) -> Tensor:
        return attend(True, columns, backend='torch')(value, shapes, starts, points, logits, gate, *around)

    tensors = [value, points, logits, gate]
    actual = values_and_gradients(filled_up, tensors, range(4))
    assert_same(actual, values_and_gradients(exact, tensors, range(4)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('bad', ['-inf', 'nan'])
@pytest.mark.parametrize('backend', BACKENDS)
def test_a_sample_that_is_masked_or_no_number_is_as_in_the_reference(backend: str, bad: str) -> None:
    inputs = make((2, 12), queries=3)
    inputs[4][0, 0, 0, 5] = float(bad)
    inputs[3][0, 1, 0, 2] = float('nan')  # a location that is no number adds nothing
    actual = attend(True, 0, backend=backend)(*inputs)
    expected = attend(True, 0, backend='torch')(*inputs)
    assert actual[1].isfinite().all() and (bad == 'nan') == bool(actual[0, 0].isnan().any())
    torch.testing.assert_close(actual, expected, equal_nan=True)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize('columns', [0, 4], ids=['locations', 'boxes'])
@pytest.mark.parametrize('backend', BACKENDS)
def test_16_bits_are_as_exact_as_their_numbers(backend: str, columns: int, dtype: torch.dtype) -> None:
    rounded = [x.to(dtype) if x.is_floating_point() else x for x in make((2, 12), columns)]
    exact = [x.double() if x.is_floating_point() else x for x in rounded]
    output = attend(True, columns, backend=backend)(*rounded)
    assert output.dtype is dtype
    tolerance = 2e-2 if dtype is torch.bfloat16 else 2e-3
    expected = attend(True, columns, backend='torch')(*exact)
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)


@one_graph
@pytest.mark.parametrize('backend', ['auto', 'torch', NATIVE])
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
    'negative': ([3, -1, 10], {}, r'\[3, -1, 10\] must have a positive integer'),
    'bool': ([True, 9, 2], {}, r'\[True, 9, 2\] must have a positive integer'),
    'number': (4, {}, 'num_points=4 must be a list of 3 positive integers'),
    'fraction': ([3.0, 6.0, 3.0], {}, r'\[3.0, 6.0, 3.0\] must have a positive integer'),
    'two_axes': (COUNTS, {4: torch.zeros(2, 4, 2, 3, 4)}, r'logits must be \(B, Q, H, 12\), got \(2, 4, 2, 3, 4\)'),
    'gate_of_levels': (COUNTS, {5: torch.zeros(2, 4, 2, 3)}, r'gate must be .*12\|1\), got \(2, 4, 2, 3\)'),
    'gate_of_two_axes': (COUNTS, {5: torch.zeros(2, 4, 2, 3, 1)}, r'gate must be \(B\|1, Q\|1, H\|1, 12\|1\), got'),
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
    with pytest.raises(ValueError, match='2 numbers for 3 levels'):
        points_of_levels([4, 4], 3)


@pytest.mark.parametrize('count', [0, -1, True])
def test_one_number_of_points_is_positive(count: int) -> None:
    with pytest.raises(ValueError, match=f'num_points={count} must be a positive integer'):
        MultiScaleDeformableAttention(16, 2, 3, count)
