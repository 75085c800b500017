"""PLuG attention's Triton kernels: in the interpreter on small shapes, on a GPU at real ones, against float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import DEVICES, one_graph
from helpers.gated import gated_attention
from helpers.pairs import attend, by_maps, drawn, make, solved
from helpers.samplings import compare
from torch import Tensor

from mmgate.errors import ConfigError
from mmgate.gates.plug import PLuGGate
from mmgate.ops.dense import triton_dense as fused

pytest.importorskip('triton', minversion='3.2')
pytestmark = pytest.mark.usefixtures('on_device')
CASES: dict[str, dict[str, Any]] = {  # name: what differs from the default
    'shared': {},
    'per_head': dict(gates=2, bias='bh1m', masks=True),
    'mask_by_head': dict(bias='bh1m', masks=True),  # whose heads do not pair, nor those of the next
    'three_heads': dict(heads=3, bias='bhnm', masks=True),
    'two_pairs': dict(heads=4, columns=37),
    'two_pairs_masked': dict(heads=4, bias='b1nm', masks=True),
    'odd_widths': dict(dim=20, width=12, bias='11nm'),
    'padding_mask': dict(bias='b11m', masks=True),
    'whole_blocks': dict(rows=32, columns=32),
    # a bias of the keys lifts the logits of rows that are not there, too
    'lifted': dict(bias='b11m', height=100.0),
    'lifted_float16': dict(bias='b11m', height=12.0, dtype=torch.float16),
    'bfloat16': dict(dtype=torch.bfloat16, bias='b11m', height=100.0),
}
TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.06}
# Seeds of small problems of which all combinations below are launched, in each dtype and kind of blocks.
FEW = (59, 95, 36, 32, 88, 58, 9, 72, 39, 55, 86, 42, 4, 23, 57, 8)
PROBLEMS = [pytest.param(FEW, id='few'), pytest.param(range(100), id='many', marks=pytest.mark.slow)]
KINDS = dict(BIASED=(0, 1, 2), EVEN=(False, True), PAIR=(False, True))


@pytest.mark.parametrize('seeds', PROBLEMS)
@pytest.mark.usefixtures('poisoned_memory', 'within_bounds')
def test_random_problems_equal_a_float64_program(seeds: Iterable[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """In small blocks, and in those of GPUs of every generation."""
    launched: list[dict[str, Any]] = []
    launch, small_blocks = fused.launch, fused.blocks_for
    monkeypatch.setattr(fused, 'launch', lambda *x, **constants: (launched.append(constants), launch(*x, **constants)))
    for seed in seeds:
        draw, given = drawn(seed)
        dtype = draw.choice([torch.float32, torch.float32, torch.float16, torch.bfloat16])
        blocks = draw.choice([small_blocks, partial(fused.blocks_on, draw.choice([80, 90, 100, 120]))])
        monkeypatch.setattr(fused, 'blocks_for', blocks)
        given = given._replace(**{name: getattr(given, name).to(dtype) for name in given._fields[:5]})
        expected, found = solved(given, by_maps, torch.float64), solved(given, 'triton', dtype)
        # where there is one key or a row is one-hot, the truth is 0 and what is found is the rounding of what cancels
        least = 0.03 if dtype is torch.float32 else 1.0
        compare(found, {name: expected[name] for name in found}, 3 * TOLERANCES[dtype], f'problem {seed}:', least)
    seen = {tuple(x[name] for name in KINDS) for x in launched}
    assert not [x for x in itertools.product(*KINDS.values()) if x not in seen]


INTERPRETED = [(name, 'cpu') for name in ('shared', 'bfloat16', 'mask_by_head')]
ON_GPU = [pytest.param(name, 'cuda', marks=pytest.mark.gpu) for name in CASES]


@pytest.mark.parametrize('name, device', [*INTERPRETED, *ON_GPU])
@pytest.mark.usefixtures('poisoned_memory')
def test_equals_the_reference(name: str, device: str) -> None:
    """With the same bits a second time."""
    real = dict(rows=1000, columns=1100, dim=32, width=32) if device == 'cuda' else {}
    given = make(device, **(real | CASES[name]))
    dtype = given.query.dtype
    expected, found = solved(given, 'torch', torch.float64), solved(given, 'triton', dtype)
    assert found['output'].dtype is dtype
    of_gate = [x for x in found if x.startswith('gate.')]  # sums over all pairs, which nearly cancel
    compare(found, {x: expected[x] for x in found if x not in of_gate}, TOLERANCES[dtype])
    compare(found, {x: expected[x] for x in of_gate}, TOLERANCES[dtype] * (10 if device == 'cuda' else 1))
    again = solved(given, 'triton', dtype)
    assert all(torch.equal(again[x], found[x]) for x in found)


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('bias, fill', [('b11m', torch.finfo(torch.float32).min), ('bhnm', -1e9)], ids=['least', '1e9'])
def test_a_row_masked_throughout_by_a_finite_number(fill: float, bias: str, device: str) -> None:
    """Its keys weigh alike, and its gradients say so; in float32 the logits are lost beside such a number."""
    given = make(device, bias=bias)
    given.bias[0, :, -1:] = fill
    given.bias[1, :, -1:, ::2] = fill
    found, expected = solved(given, 'triton'), solved(given, 'torch')
    assert all(x.isfinite().all() for x in expected.values())
    compare(found, {name: expected[name] for name in found}, 1e-4)


@one_graph
@pytest.mark.parametrize('device', DEVICES)
def test_registered_op(device: str) -> None:
    given = make(device, bias='b11m', masks=True)
    scalars = torch.randn(4, device=device, requires_grad=True)
    leaves = [x.requires_grad_() for x in given[:5]]
    torch.library.opcheck(torch.ops.mmgate.plug_attention_fused.default, (*leaves, scalars, given.bias))


@one_graph
@pytest.mark.parametrize('device', DEVICES)
def test_layer_compiled_recomputed_and_under_autocast(device: str) -> None:
    layer = gated_attention(PLuGGate, 32, 2, batch_first=True, init='paper', backend='triton').to(device)
    x = torch.randn(2, 20, 32, device=device, requires_grad=True)
    padding = (torch.arange(20) >= torch.tensor([[12], [20]])).to(device)

    def run(x: Tensor) -> Tensor:
        return layer(x, x, x, key_padding_mask=padding)[0]

    expected = run(x)
    compiled = torch.compile(run, fullgraph=True, backend='aot_eager' if device == 'cpu' else 'inductor')
    torch.testing.assert_close(compiled(x), expected)
    (plain,) = torch.autograd.grad(expected.square().sum(), x)
    recomputed = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(recomputed.square().sum(), x)[0], plain)
    with torch.autocast(device, torch.bfloat16):
        torch.testing.assert_close(run(x).float(), expected, rtol=0.05, atol=0.02)


@pytest.mark.parametrize(
    'options, message',
    [
        (dict(position='post_softmax'), "position='post_softmax'"),
        (dict(residual=False), 'residual=False'),
        (dict(gml='sum'), r"\('sum', 'tanh'\)"),
        (dict(activation='softsign'), 'softsign'),
        (dict(ratio=9.0), 'gates of 144 channels'),
    ],
    ids=str,
)
def test_refused_when_a_layer_is_built_and_when_it_is_called(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an error that command lines print without a traceback, whoever asks for the kernels."""
    with pytest.raises(ConfigError, match=f"backend 'triton' does not have .*{message}.* Use 'chunked'"):
        gated_attention(PLuGGate, 32, 2, init='paper', backend='triton', **options)
    layer, x = gated_attention(PLuGGate, 32, 2, init='paper', **options), torch.randn(3, 1, 32)
    monkeypatch.setenv('MMGATE_PLUG_ATTENTION', 'triton')
    with pytest.raises(ConfigError, match=message):
        layer(x, x, x)


@pytest.mark.parametrize(
    'changed, message',
    [
        (dict(dropout=0.1), r'dropout=0\.1'),
        (dict(bias=torch.zeros(21, requires_grad=True)), 'a bias that needs a gradient'),
        (dict(value=torch.randn(2, 2, 21, 8)), 'values of 8 channels beside 16'),
    ],
    ids=['dropout', 'bias', 'values'],
)
def test_refused_calls(changed: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=message):
        attend(make()._replace(**changed), 'triton')
    monkeypatch.setattr(torch.version, 'hip', '6.4')
    query: Any = SimpleNamespace(device=torch.device('cuda'), dtype=torch.float16, shape=(1, 1))
    assert 'ROCm' in fused.why_not_triton_dense(query)
