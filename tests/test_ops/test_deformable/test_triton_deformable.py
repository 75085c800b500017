"""The Triton sampler: in the interpreter on small shapes, on a GPU at real ones, against the float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import DEVICES, assert_same, one_graph
from helpers.samplings import (
    CASES,
    REAL,
    TINY,
    Problem,
    agree,
    by_backend,
    case_of,
    exactly,
    make,
    results,
    run,
    unevenly,
)
from helpers.samplings import compare as compare_results
from torch import Tensor

from mmgate.ops.deformable import triton_deformable as fused
from mmgate.ops.deformable.grid_sample import why_not_grid_sample
from mmgate.ops.deformable.mmcv import why_not_mmcv

triton = pytest.importorskip('triton', minversion='3.2')
OLD_INTERPRETER = tuple(map(int, triton.__version__.split('.')[:2])) < (3, 8)
pytestmark = pytest.mark.usefixtures('on_device')


# In the interpreter a program takes a sixth of a second for each of its samples: one program, where that shows enough.
FEW = dict(heads=1, queries=3)
SEVERAL = 'default'  # has more images, heads and programs


def small(device: str, **case: Any) -> list[Tensor | None]:
    return make(device, **((FEW if device == 'cpu' else {}) | case))


def compare(inputs: list[Tensor | None], tolerance: float, **options: Any) -> None:
    agree('triton', inputs, tolerance, **options)


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('name', CASES)
@pytest.mark.usefixtures('poisoned_memory')
def test_equals_the_reference(name: str, device: str) -> None:
    case, options, tolerance = case_of(name)
    if device == 'cuda':
        case = dict(dict(levels=REAL, points=4, dim=32, queries=2000, heads=8), **case)
    elif name != SEVERAL:
        case = FEW | (dict(heads=2) if 'gate' in name else {}) | case
    compare(make(device, **case), tolerance, **options)


def of_different_numbers(columns: int) -> list[tuple[int, Problem]]:
    """Return random problems with their seeds, the smallest first, that have so many columns of reference points."""
    problems = [(seed, unevenly(seed)) for seed in range(200)]
    chosen = [
        (seed, given)
        for seed, given in problems
        if len(set(given.num_points or ())) > 1
        and columns == (0 if given.reference_points is None else given.reference_points.shape[-1])
    ]
    return sorted(chosen, key=lambda problem: problem[1].logits.numel())


@pytest.mark.parametrize('columns', [0, 2, 4], ids=['locations', 'points', 'boxes'])
@pytest.mark.usefixtures('poisoned_memory')
def test_levels_with_different_numbers_of_points(columns: int) -> None:
    """Random problems of which one has several heads and one its tokens as queries."""
    chosen = of_different_numbers(columns)
    of_heads = [(seed, given) for seed, given in chosen if given.logits.shape[2] > 1]
    of_tokens = [(seed, given) for seed, given in chosen if given.logits.shape[1] == given.value.shape[1]]
    for seed, given in [of_heads[0], of_tokens[0]]:
        compare_results(f'problem {seed}', by_backend(given, 'triton'), exactly(given), 1e-4)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_of_levels_with_different_numbers_of_points(dtype: torch.dtype) -> None:
    """Boxes are divided by the numbers of points in float32."""
    _, given = of_different_numbers(4)[0]
    step = 2.0**-10 if dtype is torch.float16 else 2.0**-7
    # both read the same rounded numbers
    actual, expected = (by_backend(given, backend, dtype) for backend in ('triton', 'torch'))
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype is dtype
        torch.testing.assert_close(x.float(), y.float(), rtol=2 * step, atol=2 * step * float(y.abs().max()))


@pytest.mark.parametrize(
    'name, scalars',
    [
        *((name, True) for name in ('dim_32', 'dim_128', 'encoder', 'encoder_from_boxes')),
        *((name, False) for name in ('dim_128', 'encoder_from_boxes')),
    ],
)
@pytest.mark.usefixtures('poisoned_memory', 'within_bounds')
def test_blocks_as_on_a_gpu(name: str, scalars: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries of a program and pieces of a row as they are launched: two from sm_90 on, four before."""
    monkeypatch.setattr(fused, 'scalar_reductions', lambda value: scalars)
    case: dict[str, Any] = dict(levels=TINY, heads=1, spread=0.3, dim=32)
    case |= dict(dim_32=dict(spread=None, queries=37), dim_128=dict(spread=None, queries=9, dim=128)).get(name, {})
    case |= dict(reference=4, batch=2) if 'boxes' in name else {}
    cut = fused.cut_for(torch.empty(1, 1, 1, case['dim']), torch.empty(1, 2), backward=True)
    assert cut.pieces == (4 if scalars else 2)
    monkeypatch.setattr(fused, 'INTERPRETED_QUERIES', cut.constants(case['dim'])['BLOCK_Q'])
    compare(make(**case), 2e-5)


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize('reference', [0, 2], ids=['locations', 'offsets'])
def test_half_precision(dtype: torch.dtype, reference: int, device: str) -> None:
    """What comes in and goes out is rounded to 16 bits, nothing between."""
    inputs = small(device, reference=reference, dtype=dtype)
    actual, expected = results('triton', inputs, dtype), results('torch', inputs, torch.float32)
    step = 2.0**-10 if dtype is torch.float16 else 2.0**-7
    for name, value in expected.items():
        assert actual[name].dtype is dtype
        # what comes into the backward pass is rounded, too
        atol = step * (0.05 if name == 'output' else value.abs().max().item())
        assert_same({name: actual[name]}, {name: value}, rtol=step, atol=atol)


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('reference', [2, 4], ids=['points', 'boxes'])
def test_reference_points_without_a_gradient(reference: int, device: str) -> None:
    """Detached ones, as a decoder's, leave the other gradients as they are."""
    inputs = small(device, reference=reference)
    inputs[3].requires_grad_()
    (alone,) = torch.autograd.grad(run('triton')(*inputs).square().sum(), inputs[3])
    inputs[6].requires_grad_()
    beside, _ = torch.autograd.grad(run('triton')(*inputs).square().sum(), (inputs[3], inputs[6]))
    torch.testing.assert_close(alone, beside)


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('reference', [0, 2, 4], ids=['locations', 'points', 'boxes'])
@pytest.mark.parametrize(
    'bad',
    [float('nan'), *(pytest.param(float(x), marks=pytest.mark.slow) for x in ('inf', '-inf', '3e38', '1e30', '-1e30'))],
)
def test_locations_that_are_no_numbers_or_far_off_add_nothing(bad: float, reference: int, device: str) -> None:
    """As in the reference: the rest of the row stays as it is, and so do the gradients."""
    if device == 'cpu' and bad != bad and OLD_INTERPRETER:
        pytest.skip('the interpreter of Triton 3.6 and 3.7 lets NaN through where a GPU does not')
    inputs = small(device, reference=reference)
    inputs[3][0, 0, 0, 0, 0, 0] = bad
    inputs[3][0, 1] = bad
    leaves = inputs[0].requires_grad_(), inputs[4].requires_grad_()
    outputs = {backend: run(backend)(*inputs) for backend in ('triton', 'torch')}
    assert torch.equal(outputs['triton'][0, 1], torch.zeros_like(outputs['triton'][0, 1]))
    actual, expected = ((x, *torch.autograd.grad(x.square().sum(), leaves)) for x in outputs.values())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@one_graph
@pytest.mark.parametrize('device', DEVICES)
def test_registered_op(device: str) -> None:
    value, shapes, starts, points, logits, gate, reference = small(device, reference=2, levels=[(3, 5)])
    leaves = [t.requires_grad_() for t in (value, points, reference, logits, gate)]
    inputs = (value, shapes, starts, points, logits, gate, True, 'pre_softmax', reference, None)
    torch.library.opcheck(torch.ops.mmgate.ms_deform_attn_fused.default, inputs)
    assert all(leaf.requires_grad for leaf in leaves)


@one_graph
@pytest.mark.parametrize('device', DEVICES)
def test_compiles_without_a_graph_break(device: str) -> None:
    inputs = small(device, levels=[(3, 5)])
    backend = 'aot_eager' if device == 'cpu' else 'inductor'
    compiled = torch.compile(run('triton'), fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(*inputs), run('triton')(*inputs))


def test_what_is_not_deterministic_on_cuda_is_refused_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """mmcv's operator adds up in no fixed order, and grid_sample raises in its backward pass."""
    on_cuda = SimpleNamespace(device=torch.device('cuda'), dtype=torch.float32, is_cuda=True)
    assert why_not_grid_sample(on_cuda) is None
    monkeypatch.setattr(torch, 'are_deterministic_algorithms_enabled', lambda: True)
    for why_not in (why_not_mmcv, why_not_grid_sample):
        assert 'use_deterministic_algorithms is on' in why_not(on_cuda)
    assert why_not_grid_sample(torch.zeros(1)) is None


def test_refused_under_deterministic_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, 'are_deterministic_algorithms_enabled', lambda: True)
    with pytest.raises(ValueError, match='in no fixed order'):
        run('triton')(*make())


@pytest.mark.usefixtures('within_bounds')
def test_a_gate_that_lies_far_apart() -> None:
    """More than 2^31 numbers from its first to its last one, which 32-bit offsets do not reach."""
    inputs = make(queries=3)
    memory = torch.empty(2**31 + 32, dtype=torch.float16)  # of which next to nothing is touched
    gate = memory.as_strided((1, 3, 2, 3, 1), (2**31, 2**30 + 8, 3, 1, 1))
    gate.copy_(inputs[5])
    expected = run('triton')(*inputs[:5], gate.clone(), None)
    torch.testing.assert_close(run('triton')(*inputs[:5], gate, None), expected)


@pytest.mark.parametrize('device', DEVICES)
def test_recomputation_and_autocast(device: str) -> None:
    inputs = small(device)
    value = inputs[0].requires_grad_()
    plain = torch.autograd.grad(run('triton')(*inputs).square().sum(), value)
    output = torch.utils.checkpoint.checkpoint(run('triton'), *inputs, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(output.square().sum(), value), plain)
    with torch.autocast(device, torch.bfloat16):
        assert run('triton')(*inputs).dtype is torch.float32  # the inputs' type, as every backend


@pytest.mark.gpu
def test_cuda_graph() -> None:
    inputs = make('cuda', levels=REAL, points=4, dim=32, queries=300, heads=8)
    expected = run('triton')(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run('triton')(*inputs)
    output.fill_(float('nan'))
    graph.replay()
    torch.testing.assert_close(output, expected)


def large(
    tokens: int = 18, queries: int = 1, heads: int = 1, levels: int = 3, dim: int = 16, columns: int = 0
) -> list[Tensor | None]:
    """Arguments of too many numbers, of which one is in memory."""
    one, areas = torch.zeros(1), torch.tensor([tokens - levels + 1] + [1] * (levels - 1))
    shapes, logits = torch.stack([torch.ones_like(areas), areas], 1), one.expand(1, queries, heads, levels, 1)
    reference = one.expand(1, queries, levels, columns) if columns else None
    points = one.expand(*logits.shape, 2)
    return [one.expand(1, tokens, heads, dim), shapes, areas.cumsum(0) - areas, points, logits, None, reference]


@pytest.mark.parametrize(
    'inputs, message',
    [
        (lambda: make(dtype=torch.float64), 'float64'),
        (lambda: make(dim=160), '128 channels or fewer'),
        (lambda: [*make()[:6], torch.rand(1, 5, 3, 3)], 'reference_points must have 2 or 4 columns, got 3'),
        (lambda: large(tokens=2**26, heads=2), r'fewer than 2\^31 numbers an image, the values are 2147483648'),
        (lambda: large(heads=65536), 'up to 65535 heads of all images, got 1 x 65536'),
        (lambda: large(queries=2**29, levels=1, dim=2, columns=4), 'the reference points are 2147483648'),
        (lambda: large(queries=2**27), 'the outputs are 2147483648'),
    ],
    ids=['float64', 'channels', 'columns', 'values', 'heads', 'reference_points', 'outputs'],
)
def test_refusals(inputs: Callable[[], list[Tensor | None]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run('triton')(*inputs())


@pytest.mark.usefixtures('poisoned_memory')
def test_no_pixels_and_no_queries() -> None:
    assert run('triton')(*make(queries=0)).shape == (1, 0, 32)
    value, _, starts, *rest = make()
    value = value[:, :0].requires_grad_()
    output = run('triton')(value, torch.zeros(3, 2, dtype=torch.long), torch.zeros_like(starts), *rest)
    assert torch.equal(output, torch.zeros(1, 5, 32))
    output.sum().backward()
    assert value.grad.shape == value.shape


@pytest.mark.parametrize(
    'name, scalars',
    [('default', True), ('ungated', False), ('offsets_from_boxes', False), ('tokens_as_queries', True)],
)
@pytest.mark.usefixtures('poisoned_memory', 'within_bounds')
def test_without_pairs_of_queries(name: str, scalars: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    usual = fused.cut_for
    monkeypatch.setattr(fused, 'scalar_reductions', lambda value: scalars)

    def apart(value: Tensor, logits: Tensor, backward: bool) -> fused.Cut:
        seen.append(backward)
        return usual(value, logits, backward)._replace(paired=False)

    monkeypatch.setattr(fused, 'cut_for', apart)
    case, options, tolerance = case_of(name)
    compare(small('cpu', **case), tolerance, **options)
    assert set(seen) == {False, True}


def test_other_cuts_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    launch, usual = fused.launch, fused.cut_for
    monkeypatch.setattr(fused, 'launch', lambda *x, **constants: (seen.append(constants), launch(*x, **constants)))
    inputs = make(levels=TINY, queries=22, heads=1, points=1)
    compare(inputs, 2e-5)
    # more pieces backward alone, which the third argument tells
    monkeypatch.setattr(fused, 'cut_for', lambda *x: usual(*x)._replace(tiled=False, warps=2, pieces=2 + 2 * x[2]))
    compare(inputs, 2e-5)
    used = [(x['TILED'], x['PIECES'], x['num_warps']) for x in seen if 'TILED' in x]
    assert used == [(True, 2, 4)] * 2 + [(False, 2, 2), (False, 4, 2)]
