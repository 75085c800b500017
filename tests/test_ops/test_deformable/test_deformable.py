"""Multi-scale deformable attention: reference against mmcv, backends against the reference."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import assert_same, needs_native, one_graph, values_and_gradients
from helpers.sampler_inputs import CASES, make_inputs
from helpers.samplings import by_backend, compare, drawn, exactly
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mmgate.errors import UnsupportedCall
from mmgate.ops import ms_deform_attn, triton_backend
from mmgate.ops import native as library
from mmgate.ops.backend import candidates
from mmgate.ops.deformable import mmcv, reference
from mmgate.ops.deformable.samples import WeightedSamples

GATES = {'head_level': (2, 2, 1), 'full': (2, 2, 3), 'head': (2, 1, 1), 'point': (1, 2, 3), 'level': (1, 2, 1)}
NATIVE = pytest.param('native', marks=needs_native)
BACKENDS = ['torch', 'grid_sample', NATIVE]


@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('backend', BACKENDS)
def test_every_backend_agrees_with_mmcv(case: str, backend: str) -> None:
    peer = pytest.importorskip('mmcv.ops.multi_scale_deform_attn').multi_scale_deformable_attn_pytorch
    inputs = make_inputs(case)
    if case == 'empty_batch':
        actual = values_and_gradients(lambda *x: ms_deform_attn(*x, backend=backend), inputs, (0, 3, 4))
        assert [x.shape for x in actual.values()] == [(0, 3, 8), *(inputs[i].shape for i in (0, 3, 4))]
        return

    def theirs(value: Tensor, shapes: Tensor, start: Tensor, locations: Tensor, logits: Tensor) -> Tensor:
        return peer(value, shapes, locations, logits.flatten(-2).softmax(-1).view_as(logits))

    expected = values_and_gradients(theirs, inputs, (0, 3, 4))
    actual = values_and_gradients(lambda *x: ms_deform_attn(*x, backend=backend), inputs, (0, 3, 4))
    assert_same(actual, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize('backend', BACKENDS)
def test_random_problems_equal_a_float64_program(backend: str) -> None:
    """Levels without a pixel are among them, offsets from points as well: their gradient is 0."""
    for seed in range(80):
        _, given = drawn(seed)
        compare(f'problem {seed}', by_backend(given, backend, torch.float64), exactly(given), 1e-9)


@pytest.mark.parametrize(
    'gate, position, residual',
    [
        (GATES['head_level'], 'pre_softmax', True),
        (GATES['full'], 'pre_softmax', False),
        (GATES['head'], 'post_softmax', True),
        (GATES['point'], 'post_softmax', False),
        (GATES['level'], 'pre_softmax', True),
    ],
    ids=str,
)
@pytest.mark.parametrize('backend', BACKENDS)
def test_gates_of_every_shape_pass_gradcheck(
    backend: str, gate: tuple[int, ...], position: str, residual: bool
) -> None:
    """All pairs of shapes and options are among the random problems."""
    inputs = [x.requires_grad_() if x.is_floating_point() else x for x in make_inputs('two_levels', gate=gate)]

    def attend(*x: Tensor) -> Tensor:
        return ms_deform_attn(*x, position=position, residual=residual, backend=backend)

    assert torch.autograd.gradcheck(attend, inputs, fast_mode=True)


@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize('backend', BACKENDS)
def test_low_precision_is_as_exact_as_its_numbers(backend: str, dtype: torch.dtype, tolerance: float) -> None:
    inputs = make_inputs('two_levels', gate=(2, 2, 1))
    rounded = [x.to(dtype) if i in (0, 4, 5) else x.float() if i == 3 else x for i, x in enumerate(inputs)]
    exact = [x.double() if x.is_floating_point() else x for x in rounded]
    output = ms_deform_attn(*rounded, backend=backend)
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), ms_deform_attn(*exact, backend='torch'), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize('bad', ['nan', 'inf', '-inf', '1e30'])
@pytest.mark.parametrize('backend', BACKENDS)
def test_a_location_that_is_no_number_has_no_gradient(backend: str, bad: str) -> None:
    """The sample adds nothing, so that its gradient is 0; those of all others stay as they are."""
    value, shapes, start, locations, logits = make_inputs('two_levels')
    far = locations.clone()
    far[0, 1, 0, 1, 0, 0] = -3.0
    locations[0, 1, 0, 1, 0, 0] = float(bad)

    def gradients(at: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in (value, at, logits)]
        output = ms_deform_attn(leaves[0], shapes, start, *leaves[1:], backend=backend)
        return torch.autograd.grad(output.sin().sum(), leaves)

    found = gradients(locations)
    assert not found[1][0, 1, 0, 1, 0].any()
    torch.testing.assert_close(found, gradients(far))


@needs_native
def test_frozen_value_gets_no_gradient() -> None:
    inputs = make_inputs('two_levels')
    inputs[3].requires_grad_()
    ms_deform_attn(*inputs, backend='native').sum().backward()
    assert inputs[0].grad is None and inputs[3].grad.abs().sum() > 0


@pytest.mark.parametrize('traced', [False, True], ids=['eager', 'registered'])
@needs_native
def test_a_second_derivative_is_exact_or_refused(traced: bool) -> None:
    """Plain PyTorch has it; in the C++ loop it would lack the part through the inputs that are saved."""
    value, shapes, start, locations, logits = make_inputs('two_levels')
    value.requires_grad_()
    logits.requires_grad_()

    def penalty(name: str) -> Tensor:
        with FlopCounterMode(display=False) if traced else nullcontext():
            output = ms_deform_attn(value, shapes, start, locations, logits, backend=name)
        gradients = torch.autograd.grad(output.sin().sum(), (value, logits), create_graph=True)
        return sum(x.square().sum() for x in gradients)

    assert torch.autograd.gradgradcheck(
        lambda v, x: ms_deform_attn(v, shapes, start, locations, x, backend='torch'), (value, logits)
    )
    torch.testing.assert_close(penalty('native'), penalty('torch'))
    with pytest.raises(UnsupportedCall, match='first derivatives alone'):
        penalty('native').backward()


@one_graph
@pytest.mark.parametrize('backend', ['auto', 'torch', NATIVE])  # grid_sample asks for the sizes of the levels
def test_compiles_without_graph_break(backend: str) -> None:
    inputs = make_inputs('two_levels', torch.float32, gate=(2, 2, 1))
    compiled = torch.compile(lambda *x: ms_deform_attn(*x, backend=backend), fullgraph=True, backend='aot_eager')
    expected = values_and_gradients(lambda *x: ms_deform_attn(*x, backend=backend), inputs, (0, 3, 4, 5))
    assert_same(values_and_gradients(compiled, inputs, (0, 3, 4, 5)), expected, rtol=1e-4, atol=1e-5)


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
    inputs = make_inputs('two_levels', torch.float32)
    compiled = torch.compile(ms_deform_attn, fullgraph=True, backend='eager')
    torch.testing.assert_close(compiled(*inputs), ms_deform_attn(*inputs))


@pytest.mark.parametrize('backend', BACKENDS)
def test_an_empty_last_level_is_passed_over(backend: str) -> None:
    value, _, _, locations, logits = make_inputs('two_levels')
    start, shapes = torch.tensor([0, 30]), torch.tensor([(5, 6), (0, 4)])
    actual = ms_deform_attn(value, shapes, start, locations, logits, backend=backend)
    weights = logits.flatten(-2).softmax(-1).view_as(logits)
    first = reference.sum_samples(
        WeightedSamples(value, shapes[:1], start[:1], locations[..., :1, :, :], weights[..., :1, :])
    )
    torch.testing.assert_close(actual, first)


@pytest.mark.parametrize('backend', BACKENDS)
def test_no_points_and_no_channels(backend: str) -> None:
    value, shapes, start, locations, logits = make_inputs('two_levels')
    output = ms_deform_attn(value, shapes, start, locations[..., :0, :], logits[..., :0], backend=backend)
    assert torch.equal(output, torch.zeros(2, 5, 8, dtype=torch.float64))
    assert ms_deform_attn(value[..., :0], shapes, start, locations, logits, backend=backend).shape == (2, 5, 0)


# name: (inputs in the place of the usual ones, options, message)
BAD: dict[str, tuple[dict[int, Tensor], dict[str, str], str]] = {
    'unknown_backend': ({}, dict(backend='cuda'), 'one of auto, mmcv, native, triton, grid_sample'),
    'impossible_backend': (
        {},
        dict(backend='mmcv'),
        'value is on cpu. Usable here: (native, )?grid_sample, torch',
    ),
    'position': ({}, dict(position='pre'), 'choose one of pre_softmax, post_softmax'),
    'areas': ({1: torch.tensor([(4, 6), (2, 2)])}, {}, 'value has 30 tokens, but .* hold 28'),
    'levels': ({1: torch.tensor([(5, 6)])}, {}, r'spatial_shapes must be \(L, 2\) with L = 2'),
    'locations': ({3: torch.rand(2, 5, 2, 2, 3)}, {}, 'sampling_locations must be'),
    'starts': ({2: torch.tensor([0, 25])}, {}, r'level_start_index \[0, 25\] .* side by side over the 30 tokens'),
    'overlap': ({2: torch.tensor([0, 23])}, {}, r'level_start_index \[0, 23\] .* side by side'),
    'negative': ({2: torch.tensor([-1, 24])}, {}, r'level_start_index \[-1, 24\] .* side by side'),
    'gate': ({5: torch.rand(2, 5, 3, 2, 1)}, {}, r'gate must be .* with H = 2 as in value, got \(2, 5, 3, 2, 1\)'),
    'integers': ({0: torch.ones(2, 30, 2, 4).long()}, {}, 'value must be floating point'),
    'value': ({0: torch.rand(2, 30, 8)}, {}, r'value must be \(B, S, H, D\)'),
    'heads': ({0: torch.rand(2, 30, 4, 4)}, {}, r'logits must be \(B, Q, H, L, P\) with H = 4 as in value'),
    'sizes': ({1: torch.tensor([(-4, -6), (2, 3)])}, {}, r'spatial_shapes must not be negative, got \[\[-4'),
    'empty_level': ({1: torch.tensor([(5, 6), (0, 4)]), 2: torch.tensor([0, 31])}, {}, r'level_start_index \[0, 31\]'),
}


@pytest.mark.parametrize('changed, options, message', BAD.values(), ids=BAD)
def test_bad_input_is_named(changed: dict[int, Tensor], options: dict[str, str], message: str) -> None:
    inputs = make_inputs('two_levels', gate=(2, 2, 1))
    with pytest.raises(ValueError, match=message):
        ms_deform_attn(*(changed.get(i, x) for i, x in enumerate(inputs)), **options)


@pytest.mark.parametrize(
    'device, order',
    [
        ('cuda', ['mmcv', 'grid_sample', 'torch']),
        ('mps', ['grid_sample', 'torch']),
        ('cpu', ['native', 'grid_sample', 'torch']),
    ],
)
def test_order_where_all_packages_are_installed(device: str, order: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmcv, 'why_unavailable', lambda: None)
    monkeypatch.setattr(library, 'why_unavailable', lambda: None)
    value: Any = SimpleNamespace(device=torch.device(device), dtype=torch.float32, is_cuda=device == 'cuda', shape=[32])
    chosen, _ = candidates('ms_deform_attn', value)
    assert [backend.name for backend in chosen] == order
