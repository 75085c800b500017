"""Multi-scale deformable attention: what holds for every backend, its limits, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from conftest import TORCH, needs_native, one_graph
from helpers.samplings import attend, compare, make, problems, solved
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mmgate.errors import UnsupportedCall
from mmgate.ops import ms_deform_attn, triton_backend
from mmgate.ops.deformable import offset_locations, reference
from mmgate.ops.deformable.samples import Samples, padded_levels, weighted

NATIVE = pytest.param('native', marks=needs_native)
KERNELS = [NATIVE, 'triton', pytest.param('triton', id='triton_on_gpu', marks=pytest.mark.gpu)]
every_kernel = pytest.mark.parametrize('backend', KERNELS, indirect=True)
every_backend = pytest.mark.parametrize('backend', ['torch', 'grid_sample', *KERNELS], indirect=True)
COUNTS = (2, 1, 2)


def small(backend: str, device: str, **options: Any) -> Samples:
    """Return the usual problem, or one that is small enough for Triton's interpreter."""
    few = dict(heads=1, queries=3) if (backend, device) == ('triton', 'cpu') else {}
    return make(device, **(options | few))


def filled_up(samples: Samples) -> Tensor:
    """As mmcv's operator and other packages get levels with different numbers of points."""
    return reference.sum_samples(padded_levels(weighted(samples)))


@pytest.mark.parametrize('program', ['torch', 'grid_sample', filled_up])
def test_random_problems_equal_a_float64_program(program: str | Callable[[Samples], Tensor]) -> None:
    """In outputs and gradients; levels without a pixel are among them, and samples that miss the map."""
    for name, given, expected in problems():
        compare(solved(given, program, torch.float64), expected, 1e-9, name)
        compare(solved(given, program), expected, 1e-4, f'{name} in float32')


@every_backend
@pytest.mark.parametrize(
    'dtype, case',
    [
        (torch.float16, dict(queries=70, dim=20)),
        (torch.bfloat16, dict(reference=2, dim=16)),
        (torch.float16, dict(reference=4, counts=COUNTS, dim=16)),
        (torch.bfloat16, dict(reference=4, counts=COUNTS, queries=70, dim=20)),
    ],
    ids=['float16', 'points', 'float16_boxes', 'boxes'],
)
def test_16_bits(backend: str, device: str, case: dict[str, Any], dtype: torch.dtype) -> None:
    """What comes in and goes out is rounded to 16 bits, nothing between."""
    given = small(backend, device, dtype=dtype, **case)
    step = 2.0**-10 if dtype is torch.float16 else 2.0**-7
    actual, expected = solved(given, backend, dtype), solved(given, 'torch')
    for name, right in expected.items():
        assert actual[name].dtype is dtype
        # what comes into the backward pass is rounded, too
        atol = step * (0.05 if name == 'output' else float(right.abs().max()))
        torch.testing.assert_close(actual[name].float(), right, rtol=step, atol=atol, msg=lambda m, n=name: f'{n}: {m}')


@pytest.mark.parametrize('columns', [2, 4], ids=['points', 'boxes'])
def test_locations_from_16_bit_offsets_are_float32(columns: int) -> None:
    """As autocast gives them; in bfloat16 the locations themselves would be pixels off."""
    offsets = torch.linspace(-6, 6, 2 * 3 * 4 * 2).view(1, 2, 1, 3, 4, 2).bfloat16()
    points, shapes = torch.rand(1, 2, 3, columns), torch.tensor([(100, 167), (50, 84), (25, 42)])
    locations = offset_locations(offsets, points, shapes)
    exact = offset_locations(offsets.double(), points.double(), shapes)
    assert locations.dtype is torch.float32
    assert ((locations.double() - exact) * shapes.flip(-1)[:, None]).abs().max() < 1e-3


FAR_OFF = [('nan', 0), ('nan', 4), ('inf', 2), ('-inf', 4), ('1e30', 0), ('3e38', 2), ('-1e30', 4)]


@every_backend
@pytest.mark.parametrize('bad, columns', FAR_OFF)
def test_locations_that_are_no_numbers_or_far_off(bad: str, columns: int, backend: str, device: str) -> None:
    """They add nothing, as samples far off the map: the gradients of others stay as they are."""
    if backend == 'triton' and device == 'cpu' and bad == 'nan':
        pytest.importorskip('triton', minversion='3.8', reason='the interpreter lets NaN through where a GPU does not')
    given = small(backend, device, reference=columns, queries=70 if bad == 'nan' else 5)
    far = given._replace(points=given.points.clone())
    for points, number in ((given.points, float(bad)), (far.points, -300.0)):
        points[0, 0, 0, 0, 0, 0] = number
        points[0, 1] = number
    actual, expected = solved(given, backend), solved(far, backend)
    assert not actual['output'][0, 1].any() and not actual['points'][0, 1].any()
    assert not actual['points'][0, 0, 0, 0, 0].any()
    compare(actual, {n: expected[n] for n in ('output', 'value', 'points', 'logits')}, 1e-5)


@every_kernel
@pytest.mark.parametrize('columns', [2, 4])
def test_gradients_that_are_not_wanted(columns: int, backend: str, device: str) -> None:
    """Those of reference points, as a decoder's, and of frozen values are left out; others stay as they are."""
    given = small(backend, device, reference=columns)

    def gradients(names: list[str]) -> dict[str, Tensor]:
        leaves = {name: getattr(given, name).clone().requires_grad_() for name in names}
        output = attend(given._replace(**leaves), backend)
        return dict(zip(leaves, torch.autograd.grad(output.square().sum(), list(leaves.values())), strict=True))

    expected = gradients(['value', 'points', 'logits', 'reference_points'])
    for absent in ('value', 'reference_points'):
        names = [name for name in expected if name != absent]
        compare(gradients(names), {name: expected[name] for name in names}, 1e-5)


@pytest.mark.parametrize('tracer', [nullcontext(), FlopCounterMode(display=False)], ids=['eager', 'registered'])
@needs_native
def test_a_second_derivative_is_exact_or_refused(tracer: AbstractContextManager[Any]) -> None:
    """Plain PyTorch has it; in the C++ loop it would lack the part through the inputs that are saved."""
    given = make(dtype=torch.float64, dim=4)
    value, logits = given.value.requires_grad_(), given.logits.requires_grad_()

    def penalty(name: str) -> Tensor:
        with tracer:
            output = attend(given, name)
        gradients = torch.autograd.grad(output.sin().sum(), (value, logits), create_graph=True)
        return sum(x.square().sum() for x in gradients)

    assert torch.autograd.gradgradcheck(
        lambda v, x: attend(given._replace(value=v, logits=x), 'torch'), (value, logits), fast_mode=True
    )
    torch.testing.assert_close(penalty('native'), penalty('torch'))
    with pytest.raises(UnsupportedCall, match='first derivatives alone'):
        penalty('native').backward()


@pytest.mark.parametrize(
    'backend, case',  # grid_sample asks for the sizes of the levels
    [
        ('auto', {}),
        ('torch', {}),
        ('auto', dict(reference=4, counts=COUNTS)),
        pytest.param('native', {}, marks=needs_native),
        ('triton', dict(levels=[(3, 5)])),
        pytest.param('triton', {}, marks=pytest.mark.gpu, id='triton_on_gpu'),
    ],
    indirect=['backend'],
)
def test_compiles_without_a_graph_break(backend: str, case: dict[str, Any], device: str) -> None:
    """With the numbers and gradients of eager mode, also where the graph breaks, below torch 2.5."""

    def call(*tensors: Any) -> Tensor:
        *first, around = tensors
        options = dict(reference_points=around, num_points=given.num_points, backend=backend)
        return ms_deform_attn(*first, **options)

    given = small(backend, device, **case)
    compiler = 'aot_eager' if device == 'cpu' else 'inductor'
    traced = torch.compile(call, fullgraph=TORCH >= (2, 5), backend=compiler)
    found, expected = (solved(given, lambda x, run=run: run(*x[:6], x.reference_points)) for run in (traced, call))
    compare(found, expected, 1e-4)


@one_graph
def test_compiles_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracer follows no import that fails, as Triton's beside a CPU build of torch."""

    def missing() -> str | None:
        try:
            import no_such_package  # noqa: F401
        except ImportError:
            return 'not installed'
        return None

    monkeypatch.setattr(triton_backend, 'why_unavailable', missing)
    inputs = make()[:6]
    traced = torch.compile(ms_deform_attn, fullgraph=True, backend='eager')
    torch.testing.assert_close(traced(*inputs), ms_deform_attn(*inputs))


@one_graph
@pytest.mark.parametrize(
    'case',
    [dict(reference=2), dict(gate=(1, 1, 1), dtype=torch.bfloat16), dict(reference=4, counts=COUNTS, gate=None)],
    ids=['points', 'bfloat16', 'counts'],
)
@every_kernel
def test_the_registered_operator_passes_opcheck(case: dict[str, Any], backend: str, device: str) -> None:
    if backend == 'triton' and 'counts' in case:
        pytest.skip('it gets levels of one point instead')
    given = small(backend, device, **case)
    leaves = [x for x in given if isinstance(x, Tensor) and x.is_floating_point()]
    assert all(x.requires_grad_() is x for x in leaves)
    arguments = [list(x) if isinstance(x, tuple) else x for x in given]
    name = 'ms_deform_attn_native' if backend == 'native' else 'ms_deform_attn_fused'
    torch.library.opcheck(getattr(torch.ops.mmgate, name).default, tuple(arguments))
    assert all(leaf.requires_grad for leaf in leaves)


@every_kernel
def test_recomputation_and_autocast_change_nothing(backend: str, device: str) -> None:
    """Under autocast the output has the inputs' type, as of every backend."""
    given = small(backend, device, queries=70)
    value = given.value.requires_grad_()
    plain = torch.autograd.grad(attend(given, backend).square().sum(), value)
    output = torch.utils.checkpoint.checkpoint(lambda *x: attend(Samples(*x), backend), *given, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(output.square().sum(), value), plain)
    with torch.autocast(device, torch.bfloat16):
        assert attend(given, backend).dtype is torch.float32


@every_backend
@pytest.mark.usefixtures('poisoned_memory')
def test_what_is_empty_gives_zeros(backend: str, device: str) -> None:
    """Images, queries, pixels, levels, points and channels that are not there."""
    assert attend(make(device, batch=0), backend).shape == (0, 5, 32)
    assert attend(make(device, queries=0), backend).shape == (1, 0, 32)
    given = make(device, gate=None)
    none = dict(value=given.value[:, :0].requires_grad_())
    no_pixels = none | {name: torch.zeros_like(getattr(given, name)) for name in given._fields[1:3]}
    no_levels = none | {name: getattr(given, name)[:0] for name in given._fields[1:3]}
    no_levels |= {name: getattr(given, name)[:, :, :, :0] for name in ('points', 'logits')}
    no_points = dict(points=given.points[..., :0, :], logits=given.logits[..., :0])
    for changed in (no_pixels, no_levels, no_points):
        output = attend(given._replace(**changed), backend)
        assert output.shape == (1, 5, 32) and not output.any()
    attend(given._replace(**no_pixels), backend).sum().backward()
    assert none['value'].grad.shape == none['value'].shape
    assert attend(given._replace(value=given.value[..., :0]), backend).shape == (1, 5, 0)


# name: (what differs from the usual arguments, message); other shapes are refused in test_any_arguments.py
BAD: dict[str, tuple[dict[str, Any], str]] = {
    'position': (dict(position='pre'), 'choose one of pre_softmax, post_softmax'),
    'columns': (dict(reference_points=torch.rand(1, 5, 3, 3)), 'reference_points must have 2 or 4 columns, got 3'),
    'areas': (dict(spatial_shapes=torch.tensor([(3, 5), (1, 1), (1, 1)])), 'value has 18 tokens, but .* hold 17'),
    'sizes': (dict(spatial_shapes=torch.tensor([(-3, -5), (1, 1), (2, 1)])), r'must not be negative, got \[\[-3'),
    'overlap': (dict(level_start_index=torch.tensor([0, 14, 16])), r'\[0, 14, 16\] .* side by side'),
    'negative': (dict(level_start_index=torch.tensor([-1, 15, 16])), r'\[-1, 15, 16\] .* side by side'),
    'empty_level': (
        dict(spatial_shapes=torch.tensor([(3, 5), (3, 1), (0, 4)]), level_start_index=torch.tensor([0, 15, 19])),
        r'level_start_index \[0, 15, 19\]',
    ),
    'counts': (dict(num_points=[2, 3]), r'num_points=\[2, 3\] has 2 numbers for 3 levels; give one for each'),
    'counts_sum': (dict(num_points=[2, 2, 3]), r'logits must be \(B, Q, H, 7\), got'),
    'counts_zero': (dict(num_points=[2, 0, 4]), r'num_points=\[2, 0, 4\] must have a positive integer for each level'),
    'counts_bool': (dict(num_points=[True, 2, 3]), r'\[True, 2, 3\] must have a positive integer'),
    'counts_number': (dict(num_points=4), 'num_points=4 must be a list of 3 positive integers'),
    'counts_gate': (dict(counts=COUNTS, gate=torch.zeros(1, 5, 2, 3)), r'gate must be .*5\|1\), got \(1, 5, 2, 3\)'),
}


@pytest.mark.parametrize('changed, message', BAD.values(), ids=BAD)
def test_bad_input_is_named(changed: dict[str, Any], message: str) -> None:
    changed = dict(changed)
    given = make(counts=changed.pop('counts', None))._asdict()
    with pytest.raises(ValueError, match=message):
        ms_deform_attn(**{'sampling_locations': given.pop('points'), **given, **changed})
