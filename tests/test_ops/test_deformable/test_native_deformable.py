"""mmgate's own CPU kernel: against the float64 reference, on random problems, by threads and sets of instructions.

``make sanitize`` runs this file beside the address, undefined-behaviour and thread sanitizers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import needs_native, one_graph
from helpers.samplings import CASES, Problem, agree, by_backend, case_of, compare, make, results, run

from mmgate.ops import ms_deform_attn
from mmgate.ops import native as library
from mmgate.ops.native import advice_for_native, build, why_not_native

pytestmark = needs_native


@pytest.fixture(params=[1, 7], ids=['one_thread', 'more_than_heads'])
def threads(request: pytest.FixtureRequest) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize('queries', [5, 300], ids=['few', 'many'])
@pytest.mark.parametrize('name', CASES)
@pytest.mark.usefixtures('poisoned_memory', 'threads')
def test_equals_the_reference(name: str, queries: int) -> None:
    """With many queries by a copy of each head's values, and in several parts of a head's queries."""
    case, options, tolerance = case_of(name)
    agree('native', make(**{'queries': queries, **case}), tolerance, **options)


@pytest.mark.usefixtures('instructions')
@pytest.mark.parametrize('dim', [1, 8, 12, 16, 24, 32, 40, 48, 56, 64, 72])
@pytest.mark.parametrize('queries', [5, 70], ids=['few', 'many'])
def test_any_channels_by_any_instructions_equal_the_reference(dim: int, queries: int) -> None:
    agree('native', make(dim=dim, queries=queries, points=7), 2e-5)


@pytest.mark.parametrize('gate, reference, queries', [(None, 0, 300), (18, 4, 300), (18, 2, 5), (1, 2, 300)], ids=str)
@pytest.mark.usefixtures('poisoned_memory', 'threads')
def test_levels_with_different_numbers_of_points(gate: int | None, reference: int, queries: int) -> None:
    """More points than a block has, so that one begins within a level."""
    counts = (2, 9, 7)
    there = torch.arange(9) < torch.tensor(counts)[:, None]
    tensors = make(points=9, queries=queries, reference=reference, dim=32, gate=None, batch=2, dtype=torch.float64)
    value, shapes, starts, points, logits, _, around = tensors
    gates = None if gate is None else torch.rand(2, queries, 2, gate, dtype=torch.float64) - 0.5
    samples = points[:, :, :, there], logits[:, :, :, there]
    given = Problem(value, shapes, starts, *samples, gates, True, 'pre_softmax', around, counts)
    compare('problem', by_backend(given, 'native'), by_backend(given, 'torch', torch.float64), 2e-5)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize('queries, reference, dim', [(5, 0, 16), (5, 2, 20), (70, 0, 20), (70, 2, 16)], ids=str)
def test_half_precision_is_as_exact_as_its_numbers(dtype: torch.dtype, reference: int, queries: int, dim: int) -> None:
    """What comes in and goes out is rounded to 16 bits, nothing between."""
    inputs = make(reference=reference, dtype=dtype, queries=queries, dim=dim)
    actual, expected = results('native', inputs, dtype), results('torch', inputs, torch.float32)
    step = 2.0**-10 if dtype is torch.float16 else 2.0**-7
    for name, value in expected.items():
        assert actual[name].dtype is dtype
        # what comes into the backward pass is rounded, too
        atol = step * (0.05 if name == 'output' else value.abs().max().item())
        torch.testing.assert_close(actual[name].float(), value.float(), rtol=step, atol=atol)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_numbers_are_read_and_rounded_as_by_torch(dtype: torch.dtype) -> None:
    """Every number there is: a sample at a pixel's centre is that pixel's value."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = numbers[numbers.isfinite()]
    values = numbers[: len(numbers) // 16 * 16].view(1, -1, 1, 16)
    tokens = values.shape[1]
    points = (torch.arange(tokens) + 0.5).view(1, -1, 1, 1, 1, 1) / torch.tensor([1.0, tokens])
    points[..., 0] = 0.5
    shapes, starts = torch.tensor([(tokens, 1)]), torch.tensor([0])
    for many in (False, True):  # read where they lie, or copied
        at = points.expand(-1, -1, -1, -1, 3 if many else 1, -1)
        output = ms_deform_attn(values, shapes, starts, at, torch.zeros(at.shape[:-1]), backend='native')
        torch.testing.assert_close(output.view_as(values), values, rtol=2e-3, atol=0)
    logits, gate = torch.zeros(points.shape[:-1]), torch.full((1, 1, 1, 1, 1), 1 / 3)
    doubled, rounded = (
        run('native', position='post_softmax')(x, shapes, starts, points, logits, gate, None)
        for x in (values.float(), values)
    )
    assert torch.equal(rounded, doubled.to(dtype))


@pytest.mark.parametrize('bad', ['nan', 'inf', '-inf', '3e38', '1e30', '-1e30'])
@pytest.mark.parametrize('reference, queries', [(0, 5), (2, 70), (4, 5), (0, 70)], ids=str)
def test_locations_that_are_no_numbers_or_far_off_add_nothing(bad: str, reference: int, queries: int) -> None:
    inputs = make(reference=reference, queries=queries)
    inputs[3][0, 0, 0, 0, 0, 0] = float(bad)
    inputs[3][0, 1] = float(bad)
    leaves = inputs[0].requires_grad_(), inputs[4].requires_grad_()
    outputs = {backend: run(backend)(*inputs) for backend in ('native', 'torch')}
    assert torch.equal(outputs['native'][0, 1], torch.zeros_like(outputs['native'][0, 1]))
    actual, expected = ((x, *torch.autograd.grad(x.square().sum(), leaves)) for x in outputs.values())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('bad', ['nan', 'inf'])
def test_logits_that_are_no_numbers_give_what_the_reference_gives(bad: str) -> None:
    inputs = make()
    inputs[4][0, 0, 0, 0, 0] = float(bad)
    inputs[4][0, 1, 0] = -float('inf')
    inputs[4][0, 2, 0, 0, 0] = -float('inf')  # one that weighs nothing
    torch.testing.assert_close(run('native')(*inputs), run('torch')(*inputs), equal_nan=True)


def test_the_same_bits_by_any_number_of_threads_up_to_the_heads() -> None:
    """And by more than heads twice."""
    inputs, before = make(queries=300, heads=3, dim=32, points=4), torch.get_num_threads()
    found = {}
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            found[count] = [results('native', inputs, torch.float32) for _ in range(2)]
    finally:
        torch.set_num_threads(before)
    for count, (first, second) in found.items():
        assert all(torch.equal(second[name], value) for name, value in first.items()), count
        assert count == 7 or all(torch.equal(found[1][0][name], value) for name, value in first.items()), count


def test_started_threads_do_the_same(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    inputs = make(queries=300)
    expected = results('native', inputs, torch.float32)
    monkeypatch.setattr(library, 'OWN_THREADS', True)
    actual = results('native', inputs, torch.float32)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize('gate', [(), (1,), (2, 1, 1), (5, 2, 3, 2), (1, 5, 1, 3, 2)], ids=str)
def test_gates_of_fewer_axes_and_expanded_ones(gate: tuple[int, ...]) -> None:
    inputs = make()
    inputs[5] = torch.rand(gate)
    agree('native', inputs, 2e-5)
    inputs[5] = torch.rand(gate).expand(1, 5, 2, 3, 2)
    torch.testing.assert_close(run('native')(*inputs), run('torch')(*inputs))


@pytest.mark.parametrize('reference', [2, 4], ids=['points', 'boxes'])
def test_reference_points_without_a_gradient(reference: int) -> None:
    inputs = make(reference=reference)
    inputs[3].requires_grad_()
    (alone,) = torch.autograd.grad(run('native')(*inputs).square().sum(), inputs[3])
    inputs[6].requires_grad_()
    beside, _ = torch.autograd.grad(run('native')(*inputs).square().sum(), (inputs[3], inputs[6]))
    assert torch.equal(alone, beside)


@one_graph
@pytest.mark.parametrize('of', [dict(reference=2), dict(gate=None), dict(gate=(1, 1, 1), dtype=torch.bfloat16)])
def test_the_registered_operator_passes_opcheck(of: dict[str, Any]) -> None:
    value, shapes, starts, points, logits, gate, reference = make(**of)
    leaves = [t.requires_grad_() for t in (value, points, reference, logits, gate) if t is not None]
    inputs = (value, shapes, starts, points, logits, gate, True, 'pre_softmax', reference, None)
    torch.library.opcheck(torch.ops.mmgate.ms_deform_attn_native.default, inputs)
    assert all(leaf.requires_grad for leaf in leaves)


def test_recomputation_and_autocast_change_nothing() -> None:
    inputs = make(queries=70)
    value = inputs[0].requires_grad_()
    plain = torch.autograd.grad(run('native')(*inputs).square().sum(), value)
    output = torch.utils.checkpoint.checkpoint(run('native'), *inputs, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(output.square().sum(), value), plain)
    with torch.autocast('cpu', torch.bfloat16):
        assert run('native')(*inputs).dtype is torch.float32  # the inputs' type, as every backend


def test_auto_takes_it_first_and_says_why_it_cannot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    value = torch.rand(1, 1, 1, 1)
    assert why_not_native(value) is None and advice_for_native(value) is None
    elsewhere = value.to('meta')
    assert 'not for meta' in (why_not_native(elsewhere) or '') and advice_for_native(elsewhere) is None
    try:
        monkeypatch.setattr(build, 'built_from', lambda: 'others')
        library.load.cache_clear()
        assert 'was compiled from other sources or for another processor; type' in why_not_native(value)
        monkeypatch.setenv('MMGATE_NATIVE', str(tmp_path / 'missing.so'))
        library.load.cache_clear()
        assert 'not compiled for this processor yet; type once: python -m mmgate.doctor --build' in advice_for_native(
            value
        )
        inputs = make()
        assert torch.equal(run('auto')(*inputs), run('grid_sample')(*inputs))
    finally:
        monkeypatch.undo()
        library.load.cache_clear()
    assert torch.equal(run('auto')(*inputs), run('native')(*inputs))


def test_what_the_kernel_does_not_take_is_refused() -> None:
    with pytest.raises(ValueError, match=r'takes float32, float64, bfloat16 and float16, got torch.float8'):
        run('native')(*make()[:4], make()[4].to(torch.float8_e4m3fn), None, None)
    huge = torch.zeros(1).expand(1, 2**30, 1, 1)
    one = torch.zeros(1, 1, 1, 1, 1)
    with pytest.raises(ValueError, match=r'up to 2\^30 tokens an image, got 1073741824'):
        at = one[..., None].expand(*one.shape, 2)
        run('native')(huge, torch.tensor([(2**15, 2**15)]), torch.tensor([0]), at, one, None, None)
