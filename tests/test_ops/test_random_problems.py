"""The Triton kernels on random problems in the interpreter, against float64 programs that share nothing with mmgate.

Both are slow and plain: the sampler weighs every pixel of every map by the hat function of its distance from the
sample, PLuG attention forms all maps. What a kernel reads and writes has to lie in its arguments' memory.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from helpers.samplings import by_backend, compare, drawn, exactly, with_gradients
from torch import Tensor

from mmgate.gates.plug import GatingModulation
from mmgate.ops import plug_attention
from mmgate.ops.deformable import triton_deformable as sampler
from mmgate.ops.dense import triton_dense as dense

pytest.importorskip('triton', minversion='3.2')
pytestmark = pytest.mark.usefixtures('on_device', 'poisoned_memory', 'within_bounds')
PROBLEMS = [pytest.param(4, id='few'), pytest.param(100, id='many', marks=pytest.mark.slow)]
MOST = 20  # samples of all programs of a kernel, each of which takes the interpreter 0.15 s, forward and backward
# What the many problems have launched in every combination.
SAMPLER_KINDS = dict(TILED=(False, True), REFERENCE=(0, 2, 4), GATED=(False, True))
SAMPLER_KINDS_BACKWARD = dict(TILED=(False, True), PIECES=(2, 4), GRAD_REFERENCE=(False, True))
PLUG_KINDS = dict(BIASED=(0, 1, 2), EVEN=(False, True), PAIR=(False, True))


def launches_of(backend: Any, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return a list to which the constants of all that a backend launches are added."""
    seen: list[dict[str, Any]] = []
    launch = backend.launch
    monkeypatch.setattr(backend, 'launch', lambda *x, **constants: (seen.append(constants), launch(*x, **constants)))
    return seen


def missing(launches: list[dict[str, Any]], **kinds: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return the combinations that no launch had."""
    seen = {tuple(x[name] for name in kinds) for x in launches if kinds.keys() <= x.keys()}
    return [x for x in itertools.product(*kinds.values()) if x not in seen]


def plug_by_maps(tensors: list[Tensor], bias: Tensor | None, weight: Tensor, offset: Tensor) -> Tensor:
    query, key, value, gate_query, gate_key = tensors
    s, r = (
        torch.einsum('bhnd,bhmd->bhnm', x, y) / x.shape[-1] ** 0.5 for x, y in ((query, key), (gate_query, gate_key))
    )
    logits = s * (1 + torch.tanh((weight[0] * r + offset[0]) * (weight[1] * r + offset[1])))
    logits = logits if bias is None else logits + bias
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    return torch.einsum('bhnm,bhme->bhne', weights / weights.sum(-1, keepdim=True), value)


@pytest.mark.parametrize('count', PROBLEMS)
def test_the_sampler_solves_random_problems(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = launches_of(sampler, monkeypatch)
    for seed in range(count):
        draw, given = drawn(seed)
        scalars = draw.random() < 0.5
        monkeypatch.setattr(sampler, 'scalar_reductions', lambda value, s=scalars: s)
        of_all = given.logits.numel() // given.logits.shape[1]
        blocks_of = [x for x in (4, 8, 16, 32) if -(-given.logits.shape[1] // x) * of_all <= MOST]
        monkeypatch.setattr(sampler, 'INTERPRETED_QUERIES', draw.choice(blocks_of or [64]))
        expected, actual = exactly(given), by_backend(given, 'triton')
        compare(f'problem {seed}', actual, expected, 1e-4)
    if count == PROBLEMS[-1].values[0]:
        assert not missing(launches, **SAMPLER_KINDS) and not missing(launches, **SAMPLER_KINDS_BACKWARD)


@pytest.mark.parametrize('count', PROBLEMS)
def test_plug_attention_solves_random_problems(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = launches_of(dense, monkeypatch)
    small_blocks = dense.blocks_for
    for seed in range(count):
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        dtype = draw.choice([torch.float32, torch.float32, torch.float16, torch.bfloat16])
        batch, heads = draw.randint(1, 2), draw.choice([1, 2, 2, 3, 4])
        rows, columns = draw.randint(1, 70), draw.choice([draw.randint(1, 70), 64])
        dim, width, gates = draw.choice([1, 12, 16, 32, 40]), draw.choice([1, 16, 20]), draw.choice([1, heads])
        shapes = [(heads, rows, dim), (heads, columns, dim), (heads, columns, dim), (gates, rows, width)]
        exact = [torch.randn(batch, *shape, generator=generator) for shape in [*shapes, (gates, columns, width)]]
        bias = None
        if draw.random() < 0.7:
            axes = [n if draw.random() < 0.5 else 1 for n in (batch, heads, rows, columns)]
            bias = torch.randn(axes, generator=generator)
            bias = draw.choice([bias, bias.mT.contiguous().mT, torch.where(bias > 0.3, -torch.inf, bias)])
            bias = bias.where(bias.amax(-1, keepdim=True) > -torch.inf, 0.0)  # no row without a key
        if draw.random() < 0.5:  # blocks as on a GPU
            monkeypatch.setattr(dense, 'blocks_for', partial(dense.blocks_on, draw.choice([80, 90, 120])))
        else:
            monkeypatch.setattr(dense, 'blocks_for', small_blocks)
        gml = GatingModulation('product', activation='tanh', init='paper')
        with torch.no_grad():
            gml.weight.copy_(torch.randn(2, generator=generator))
            gml.bias.copy_(torch.randn(2, generator=generator))
        leaves = [x.to(dtype).double().requires_grad_() for x in exact]
        scalars = [x.detach().double().requires_grad_() for x in (gml.weight, gml.bias)]
        added = None if bias is None else bias.double()
        expected = with_gradients(plug_by_maps(leaves, added, *scalars), [*leaves, *scalars])
        narrow = [x.to(dtype).requires_grad_() for x in exact]
        output = plug_attention(*narrow, gml, bias, backend='triton')
        actual = with_gradients(output, [*narrow, gml.weight, gml.bias])
        tolerance = {torch.float32: 3e-4, torch.float16: 0.01, torch.bfloat16: 0.06}[dtype]
        # where there is one key or a row is one-hot, the truth is 0 and what is found is the rounding of what cancels
        compare(f'problem {seed}', actual, expected, tolerance, 0.03 if dtype is torch.float32 else 1.0)
    if count == PROBLEMS[-1].values[0]:
        assert not missing(launches, **PLUG_KINDS)
