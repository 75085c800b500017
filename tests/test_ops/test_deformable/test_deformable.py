"""Multi-scale deformable attention: every backend against a float64 program, its limits, and refusals."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import assert_same, needs_native, one_graph, values_and_gradients
from helpers.samplings import Problem, by_backend, compare, drawn, exactly, make, run, unevenly
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mmgate.errors import UnsupportedCall
from mmgate.ops import ms_deform_attn, triton_backend
from mmgate.ops import native as library
from mmgate.ops.backend import candidates
from mmgate.ops.deformable import mmcv

NATIVE = pytest.param('native', marks=needs_native)
every_backend = pytest.mark.parametrize('backend', ['torch', 'grid_sample', NATIVE])


@cache
def solved() -> list[tuple[str, Problem, list[Tensor]]]:
    """Return random problems with their outputs and gradients, most with another number of points on each level."""
    given = {f'problem {seed}': drawn(seed)[1] for seed in range(60)}
    given |= {f'problem {seed} unevenly': unevenly(seed) for seed in range(150)}
    return [(name, problem, exactly(problem)) for name, problem in given.items()]


@every_backend
def test_random_problems_equal_a_float64_program(backend: str) -> None:
    """In outputs and gradients; levels without a pixel are among them, and samples that miss the map."""
    for name, given, expected in solved():
        compare(name, by_backend(given, backend, torch.float64), expected, 1e-9)
        compare(f'{name} in float32', by_backend(given, backend), expected, 1e-4)


@every_backend
@pytest.mark.parametrize('options', [dict(reference=0), dict(reference=4)], ids=['locations', 'boxes'])
@pytest.mark.parametrize('dtype, tolerance', [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)], ids=str)
def test_16_bits_are_as_exact_as_their_numbers(
    dtype: torch.dtype, tolerance: float, options: dict[str, Any], backend: str
) -> None:
    rounded = make(dtype=dtype, **options)
    exact = [x.double() if x is not None and x.is_floating_point() else x for x in rounded]
    output = run(backend)(*rounded)
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), run('torch')(*exact), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize('bad', ['nan', 'inf', '-inf', '1e30'])
@every_backend
def test_a_location_that_is_no_number_has_no_gradient(backend: str, bad: str) -> None:
    """The sample adds nothing, so that its gradient is 0; those of all others stay as they are."""
    value, shapes, start, locations, logits, *_ = make(dtype=torch.float64)
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
    inputs = make()
    inputs[3].requires_grad_()
    run('native')(*inputs).sum().backward()
    assert inputs[0].grad is None and inputs[3].grad.abs().sum() > 0


@pytest.mark.parametrize('traced', [False, True], ids=['eager', 'registered'])
@needs_native
def test_a_second_derivative_is_exact_or_refused(traced: bool) -> None:
    """Plain PyTorch has it; in the C++ loop it would lack the part through the inputs that are saved."""
    value, shapes, start, locations, logits, *_ = make(dtype=torch.float64, dim=4)
    value.requires_grad_()
    logits.requires_grad_()

    def penalty(name: str) -> Tensor:
        with FlopCounterMode(display=False) if traced else nullcontext():
            output = ms_deform_attn(value, shapes, start, locations, logits, backend=name)
        gradients = torch.autograd.grad(output.sin().sum(), (value, logits), create_graph=True)
        return sum(x.square().sum() for x in gradients)

    assert torch.autograd.gradgradcheck(
        lambda v, x: ms_deform_attn(v, shapes, start, locations, x, backend='torch'), (value, logits), fast_mode=True
    )
    torch.testing.assert_close(penalty('native'), penalty('torch'))
    with pytest.raises(UnsupportedCall, match='first derivatives alone'):
        penalty('native').backward()


@one_graph
@pytest.mark.parametrize('backend', ['auto', 'torch', NATIVE])  # grid_sample asks for the sizes of the levels
def test_compiles_without_graph_break(backend: str) -> None:
    inputs = make()[:6]
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
    inputs = make()[:6]
    compiled = torch.compile(ms_deform_attn, fullgraph=True, backend='eager')
    torch.testing.assert_close(compiled(*inputs), ms_deform_attn(*inputs))


@every_backend
def test_what_is_empty_gives_zeros(backend: str) -> None:
    """Images, queries, pixels, points and channels."""
    assert run(backend)(*make(batch=0)).shape == (0, 5, 32)
    assert run(backend)(*make(queries=0)).shape == (1, 0, 32)
    value, shapes, start, locations, logits, *_ = make()
    value = value[:, :0].requires_grad_()
    output = run(backend)(value, torch.zeros_like(shapes), torch.zeros_like(start), locations, logits, None, None)
    assert torch.equal(output, torch.zeros(1, 5, 32))
    output.sum().backward()
    assert value.grad.shape == value.shape
    value = make()[0]
    output = ms_deform_attn(value, shapes, start, locations[..., :0, :], logits[..., :0], backend=backend)
    assert torch.equal(output, torch.zeros(1, 5, 32))
    assert ms_deform_attn(value[..., :0], shapes, start, locations, logits, backend=backend).shape == (1, 5, 0)


# name: (inputs in the place of the usual ones, options, message); other shapes are refused in test_any_arguments.py
BAD: dict[str, tuple[dict[int, Tensor], dict[str, str], str]] = {
    'unknown_backend': ({}, dict(backend='cuda'), 'one of auto, mmcv, native, triton, grid_sample'),
    'impossible_backend': (
        {},
        dict(backend='mmcv'),
        'value is on cpu. Usable here: (native, )?(triton, )?grid_sample, torch',
    ),
    'position': ({}, dict(position='pre'), 'choose one of pre_softmax, post_softmax'),
    'areas': ({1: torch.tensor([(3, 5), (1, 1), (1, 1)])}, {}, 'value has 18 tokens, but .* hold 17'),
    'starts': ({2: torch.tensor([0, 15, 17])}, {}, r'level_start_index \[0, 15, 17\] .* side by side over the 18 tok'),
    'overlap': ({2: torch.tensor([0, 14, 16])}, {}, r'level_start_index \[0, 14, 16\] .* side by side'),
    'negative': ({2: torch.tensor([-1, 15, 16])}, {}, r'level_start_index \[-1, 15, 16\] .* side by side'),
    'gate': ({5: torch.rand(1, 5, 3, 3, 1)}, {}, r'gate must be .* with H = 2 as in value, got \(1, 5, 3, 3, 1\)'),
    'sizes': ({1: torch.tensor([(-3, -5), (1, 1), (2, 1)])}, {}, r'spatial_shapes must not be negative, got \[\[-3'),
    'empty_level': (
        {1: torch.tensor([(3, 5), (3, 1), (0, 4)]), 2: torch.tensor([0, 15, 19])},
        {},
        r'level_start_index \[0, 15, 19\]',
    ),
}


@pytest.mark.parametrize('changed, options, message', BAD.values(), ids=BAD)
def test_bad_input_is_named(changed: dict[int, Tensor], options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ms_deform_attn(*(changed.get(i, x) for i, x in enumerate(make()[:6])), **options)


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
