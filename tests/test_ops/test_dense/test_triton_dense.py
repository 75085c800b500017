"""PLuG attention's Triton kernels: in the interpreter on small shapes, on a GPU at real ones, against float64."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import DEVICES, assert_same, one_graph, values_and_gradients
from helpers.gated import gated_attention
from torch import Tensor

from mmgate.errors import ConfigError
from mmgate.gates.plug import GatingModulation, PLuGGate
from mmgate.ops import plug_attention
from mmgate.ops.dense import chunked
from mmgate.ops.dense import triton_dense as fused
from mmgate.ops.dense.triton_dense import why_not_triton_dense

pytest.importorskip('triton', minversion='3.2')
pytestmark = pytest.mark.usefixtures('on_device')
CASES: dict[str, dict[str, Any]] = {  # name: what differs from the default
    'shared': {},
    'per_head': dict(gate_heads=2),
    'one_head': dict(heads=1),
    'three_heads': dict(heads=3, bias='bhnm', masks=True),  # which do not pair
    'two_pairs': dict(heads=4, columns=37),
    'two_pairs_masked': dict(heads=4, bias='bhnm', masks=True),
    'cross': dict(columns=37),
    'one_block': dict(rows=7, columns=5),
    'odd_widths': dict(dim=20, width=12),
    'mask_by_head': dict(bias='bh1m', masks=True),
    'padding_mask': dict(bias='b11m', masks=True),
    'full_mask': dict(bias='bhnm', masks=True),
    'float_bias': dict(bias='11nm'),
    'whole_blocks': dict(rows=32, columns=32),
    'mask_by_head_alone': dict(gate_heads=2, bias='bh1m', masks=True),
}
PAIRED = {('pair', torch.float32, 90)}
PAIRED |= {(case, torch.bfloat16, arch) for case in ('pair', 'pair_full_bias') for arch in (80, 90, 120)}
REAL = dict(rows=1000, columns=1100, dim=32, width=32)
TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}


def make(
    device: str,
    rows: int = 19,
    columns: int = 21,
    dim: int = 16,
    width: int = 16,
    heads: int = 2,
    gate_heads: int = 1,
    bias: str | None = None,
    masks: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[Tensor], Tensor | None, GatingModulation]:
    """Tensors, bias and gate; ``bias`` names its axes, b(atch), h(eads), n (rows), m (columns), or 1 for one of all."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, rows, dim), (2, heads, columns, dim), (2, heads, columns, dim)]
    shapes += [(2, gate_heads, rows, width), (2, gate_heads, columns, width)]
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    added = None
    if bias is not None:
        sizes = dict(b=2, h=heads, n=rows, m=columns)
        added = torch.randn([sizes.get(axis, 1) for axis in bias], generator=generator)
        if masks:
            added = torch.where(added > 0.3, -torch.inf, 0.0)
            added[..., 0] = 0.0  # no row without a key
            added[:1, ..., 1 : 17 if columns < 100 else 129] = -torch.inf  # a whole block of keys
        added = added.to(device)
    gml = GatingModulation('product', activation='tanh', init='paper').to(device)
    with torch.no_grad():
        gml.weight.copy_(torch.tensor([0.7, -0.4]))
        gml.bias.copy_(torch.tensor([0.3, 0.9]))
    return tensors, added, gml


def results(backend: str, tensors: list[Tensor], bias: Tensor | None, gml: GatingModulation) -> dict[str, Tensor]:
    gml.zero_grad()
    found = values_and_gradients(lambda *x: plug_attention(*x, gml, bias, backend=backend), tensors, range(5))
    return found | {name: x.grad.clone() for name, x in gml.named_parameters()}


def check(tensors: list[Tensor], bias: Tensor | None, gml: GatingModulation, tolerance: float) -> dict[str, Tensor]:
    """Compare the kernels with the float64 reference, and return what they gave."""
    expected = results('torch', [x.double() for x in tensors], None if bias is None else bias.double(), gml.double())
    actual = results('triton', tensors, bias, gml.float())
    for name, value in expected.items():
        # the scalars' gradients are sums over all pairs, which nearly cancel
        bound = 10 * tolerance if name in ('weight', 'bias') and value.is_cuda else tolerance
        assert_same({name: actual[name]}, {name: value}, rtol=bound, atol=bound * value.abs().max().item())
    return actual


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('name', CASES)
@pytest.mark.usefixtures('poisoned_memory')
def test_equals_the_reference(name: str, device: str, request: pytest.FixtureRequest) -> None:
    if device == 'cpu':
        request.getfixturevalue('within_bounds')
    check(*make(device, **((REAL if device == 'cuda' and name != 'one_block' else {}) | CASES[name])), 1e-4)


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize(
    'dtype, height', [(torch.float32, 100.0), (torch.bfloat16, 100.0), (torch.float16, 12.0)], ids=str
)
def test_rows_beyond_the_last_add_nothing(dtype: torch.dtype, height: float, device: str) -> None:
    """A bias of the keys lifts the logits of rows that are not there, too."""
    tensors, bias, gml = make(device, bias='b11m', dtype=dtype)
    check(tensors, bias + height, gml, TOLERANCE[dtype])


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('bias', ['b11m', 'bhnm'])
@pytest.mark.parametrize('fill', [torch.finfo(torch.float32).min, -1e9], ids=['least', '-1e9'])
def test_a_row_masked_throughout_by_a_finite_number(fill: float, bias: str, device: str) -> None:
    """Its keys weigh alike, and its gradients say so; in float32 the logits are lost beside such a number."""
    tensors, added, gml = make(device, bias=bias)
    added[0, :, -1:] = fill
    added[1, :, -1:, ::2] = fill
    actual, expected = (results(backend, tensors, added, gml) for backend in ('triton', 'torch'))
    for name, value in expected.items():
        assert value.isfinite().all()
        assert_same({name: actual[name]}, {name: value}, rtol=1e-4, atol=1e-4 * value.abs().max().item())


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('case', ['pair', 'pair_full_bias', 'per_head'])
@pytest.mark.usefixtures('poisoned_memory', 'within_bounds')
def test_blocks_as_on_a_gpu(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every generation; those that differ in warps and stages alone are the same program here."""
    kinds: dict[str, Any] = dict(pair={}, per_head=dict(gate_heads=2), pair_full_bias=dict(bias='b1nm', masks=True))
    tensors, bias, gml = make('cpu', rows=70, columns=101, dim=32, width=32, dtype=dtype, **kinds[case])
    names = ('forward_kernel', 'rows_backward_kernel', 'columns_backward_kernel')
    seen = []
    for arch in (80, 90, 100, 120):
        monkeypatch.setattr(fused, 'blocks_for', partial(fused.blocks_on, arch))
        used = [fused.blocks_for(name, tensors[0], tensors[3], bias) for name in names]
        assert any(block.pair for block in used) is ((case, dtype, arch) in PAIRED)
        program = [(block.pair, block.rows, block.columns) for block in used]
        if program not in seen:
            check(tensors, bias, gml, TOLERANCE[dtype])
        seen.append(program)


@pytest.mark.parametrize('backend', ['chunked', 'triton'])
def test_gradients_of_one_hot_rows_in_16_bits(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Are off by the rounding of the output, by which delta is formed, as in other fused attentions."""
    monkeypatch.setattr(chunked, 'chunk_on', lambda device: 1 << 10)
    tensors, _, gml = make('cpu', dtype=torch.bfloat16)
    tensors[0] = 8 * tensors[0]
    expected = results('torch', [x.double() for x in tensors], None, gml.double())
    actual = results(backend, tensors, None, gml.float())
    noise = torch.randn(expected['output'].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    # |dq| <= |delta's error| |f k| / sqrt(d), with |f| < 2
    off = 2**-8 * (noise * expected['output']).abs().sum(-1, keepdim=True)
    reach = 2 * tensors[1].double().abs().amax(2, keepdim=True) / tensors[1].shape[-1] ** 0.5
    if backend == 'chunked':  # which rounds the map and its gradient, too
        reach = 2 * reach
    found, truth = (x['grad of input 0'].double() for x in (actual, expected))
    assert ((found - truth).abs() <= off * reach + 2**-7 * truth.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize('backend', ['torch', 'chunked', 'triton'])
@pytest.mark.usefixtures('poisoned_memory')
def test_no_keys_give_zeros(backend: str) -> None:
    tensors, _, gml = make('cpu', columns=0)
    output = plug_attention(*(x.requires_grad_() for x in tensors), gml, backend=backend)
    assert torch.equal(output, torch.zeros_like(output))
    output.sum().backward()
    assert all(x.grad.isfinite().all() for x in tensors)


def test_other_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, 'hip', '6.4')
    assert 'ROCm' in why_not_triton_dense(
        SimpleNamespace(device=torch.device('cuda'), dtype=torch.float16, shape=(1, 1))
    )


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype: torch.dtype, device: str) -> None:
    problem = make(device, dtype=dtype, **(REAL if device == 'cuda' else {}))
    assert check(*problem, TOLERANCE[dtype])['output'].dtype is dtype


@one_graph
@pytest.mark.parametrize('device', DEVICES)
def test_registered_op(device: str) -> None:
    tensors, bias, _ = make(device, bias='b11m', masks=True)
    scalars = torch.randn(4, device=device, requires_grad=True)
    leaves = [x.requires_grad_() for x in tensors]
    torch.library.opcheck(torch.ops.mmgate.plug_attention_fused.default, (*leaves, scalars, bias))


@one_graph
@pytest.mark.parametrize('device', DEVICES)
def test_layer_compiled_recomputed_and_under_autocast(device: str) -> None:
    layer = gated_attention(PLuGGate, 32, 2, batch_first=True, init='paper', backend='triton').to(device)
    x = torch.randn(2, 20, 32, device=device, requires_grad=True)
    padding = torch.zeros(2, 20, dtype=torch.bool, device=device)
    padding[0, 12:] = True

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


@pytest.mark.parametrize('device', DEVICES)
def test_gradients_are_deterministic(device: str) -> None:
    tensors, bias, gml = make(device)
    first, second = (results('triton', tensors, bias, gml) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


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
    'changed, options, message',
    [
        ({}, dict(dropout=0.1), r'dropout=0\.1'),
        ({}, dict(bias=torch.zeros(21, requires_grad=True)), 'a bias that needs a gradient'),
        ({2: torch.randn(2, 2, 21, 8)}, {}, 'values of 8 channels beside 16'),
    ],
    ids=['dropout', 'bias', 'values'],
)
def test_refused_calls(changed: dict[int, Tensor], options: dict[str, Any], message: str) -> None:
    tensors, _, gate = make('cpu')
    with pytest.raises(ConfigError, match=message):
        plug_attention(*(changed.get(i, x) for i, x in enumerate(tensors)), gate, backend='triton', **options)
