"""The Triton sampler: in the interpreter on random problems, on a GPU at real sizes; what it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.samplings import CASES, TOLERANCES, agree, attend, by_hats, compare, drawn, make, solved

from mmgate.ops.deformable import triton_deformable as fused
from mmgate.ops.deformable.grid_sample import why_not_grid_sample
from mmgate.ops.deformable.mmcv import why_not_mmcv
from mmgate.ops.deformable.samples import Samples

pytest.importorskip('triton', minversion='3.2')
pytestmark = pytest.mark.usefixtures('on_device')
# Seeds of small problems of which all combinations below are launched; the last have several points on a level around
# boxes and points.
FEW = (120, 135, 3, 186, 103, 107, 32, 126, 152, 141, 115, 177, 45, 31, 129, 140, 190, 93, 28, 193, 71)
PROBLEMS = [pytest.param(FEW, id='few'), pytest.param(range(100), id='many', marks=pytest.mark.slow)]
FORWARD = dict(TILED=(False, True), REFERENCE=(0, 2, 4), GATED=(False, True))
BACKWARD = dict(TILED=(False, True), PIECES=(2, 4), PAIRED=(False, True), GRAD_REFERENCE=(False, True))
FACTOR = dict(GATED=(True,), POST=(False, True), RESIDUAL=(False, True))


@pytest.mark.parametrize('seeds', PROBLEMS)
@pytest.mark.usefixtures('poisoned_memory', 'within_bounds')
def test_random_problems_equal_a_float64_program(seeds: Iterable[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the cuts of a program's work on GPUs before sm_90 and since, and blocks as there or small ones."""
    launched: list[dict[str, Any]] = []
    launch, cut_for = fused.launch, fused.cut_for
    monkeypatch.setattr(fused, 'launch', lambda *x, **constants: (launched.append(constants), launch(*x, **constants)))
    for seed in seeds:
        draw, given = drawn(seed)
        scalars, paired, as_launched = (draw.random() < 0.5 for _ in range(3))
        monkeypatch.setattr(fused, 'scalar_reductions', lambda value, scalars=scalars: scalars)
        monkeypatch.setattr(fused, 'cut_for', lambda *x, paired=paired: cut_for(*x)._replace(paired=paired))
        cut = fused.cut_for(given.value.float(), given.logits, True).constants(given.value.shape[-1])
        monkeypatch.setattr(fused, 'INTERPRETED_QUERIES', cut['BLOCK_Q'] if as_launched else 4)
        compare(solved(given, 'triton'), solved(given, by_hats, torch.float64), 1e-4, f'problem {seed}:')
    for kinds in (FORWARD, BACKWARD, FACTOR):
        seen = {tuple(x[name] for name in kinds) for x in launched if kinds.keys() <= x.keys()}
        assert not [x for x in itertools.product(*kinds.values()) if x not in seen], [*kinds]


REAL: dict[str, Any] = dict(levels=[(100, 134), (50, 67), (25, 34), (13, 17)], points=4, dim=32, queries=2000, heads=8)
# In the interpreter a program takes a sixth of a second for each of its samples.
INTERPRETED = ('huge_logits', 'neighbours_sample_together', 'neighbours_sample_the_same')
ON_GPU = [pytest.param(name, REAL | CASES[name], marks=pytest.mark.gpu) for name in CASES]


@pytest.mark.parametrize('name, case', [*((x, dict(heads=1, queries=3) | CASES[x]) for x in INTERPRETED), *ON_GPU])
@pytest.mark.usefixtures('poisoned_memory')
def test_equals_the_reference(name: str, case: dict[str, Any], device: str) -> None:
    agree('triton', make(device, **case), TOLERANCES[name])


@pytest.mark.gpu
def test_cuda_graph() -> None:
    given = make('cuda', **REAL)
    expected = attend(given, 'triton')
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend(given, 'triton')
    output.fill_(float('nan'))
    graph.replay()
    torch.testing.assert_close(output, expected)


@pytest.mark.usefixtures('within_bounds')
def test_a_gate_that_lies_far_apart() -> None:
    """More than 2^31 numbers from its first to its last one, which 32-bit offsets do not reach."""
    given = make(queries=3)
    memory = torch.empty(2**31 + 32, dtype=torch.float16)  # of which next to nothing is touched
    gate = memory.as_strided((1, 3, 2, 3, 1), (2**31, 2**30 + 8, 3, 1, 1))
    gate.copy_(given.gate)
    expected = attend(given._replace(gate=gate.clone()), 'triton')
    torch.testing.assert_close(attend(given._replace(gate=gate), 'triton'), expected)


def test_what_is_not_deterministic_is_refused_where_torch_asks_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels and mmcv's operator add up in no fixed order, and grid_sample raises in its backward pass on CUDA."""
    on_cuda = SimpleNamespace(device=torch.device('cuda'), dtype=torch.float32, is_cuda=True)
    assert why_not_grid_sample(on_cuda) is None
    monkeypatch.setattr(torch, 'are_deterministic_algorithms_enabled', lambda: True)
    for why_not in (why_not_mmcv, why_not_grid_sample):
        assert 'use_deterministic_algorithms is on' in why_not(on_cuda)
    assert why_not_grid_sample(torch.zeros(1)) is None
    with pytest.raises(ValueError, match='in no fixed order'):
        attend(make(), 'triton')


def large(tokens: int = 18, queries: int = 1, heads: int = 1, levels: int = 3, dim: int = 16, columns: int = 0) -> Any:
    """Return arguments of too many numbers, of which one is in memory."""
    one, areas = torch.zeros(1), torch.tensor([tokens - levels + 1] + [1] * (levels - 1))
    shapes, logits = torch.stack([torch.ones_like(areas), areas], 1), one.expand(1, queries, heads, levels, 1)
    points, value = one.expand(*logits.shape, 2), one.expand(1, tokens, heads, dim)
    reference = one.expand(1, queries, levels, columns) if columns else None
    return Samples(value, shapes, areas.cumsum(0) - areas, points, logits, reference_points=reference)


@pytest.mark.parametrize(
    'given, message',
    [
        (make(dtype=torch.float64), 'float64'),
        (make(dim=160), '128 channels or fewer'),
        (large(tokens=2**26, heads=2), r'fewer than 2\^31 numbers an image, the values are 2147483648'),
        (large(heads=65536), 'up to 65535 heads of all images, got 1 x 65536'),
        (large(queries=2**29, levels=1, dim=2, columns=4), 'the reference points are 2147483648'),
        (large(queries=2**27), 'the outputs are 2147483648'),
    ],
    ids=['float64', 'channels', 'values', 'heads', 'reference_points', 'outputs'],
)
def test_refusals(given: Samples, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(given, 'triton')
