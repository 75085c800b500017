"""PLuG attention in chunks: they are the whole, also when they are formed anew; and the softmax of a chunk."""

from __future__ import annotations

import copy
from itertools import cycle
from typing import Any

import pytest
import torch
from conftest import assert_same, needs_native, values_and_gradients
from helpers.plug_inputs import PER_HEAD, SHAPES, make
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from mmgate.errors import UnsupportedCall
from mmgate.gates import GatingModulation
from mmgate.ops import native, plug_attention
from mmgate.ops.dense import chunked
from mmgate.ops.dense.chunked import gated_softmax, gated_softmax_backward

CHUNKED = {
    'shared': {},
    'per_head': PER_HEAD,
    'wide_values': dict(value=(2, 4, 6, 11)),
    'bias_of_keys': dict(bias=(6,)),
    'bias_of_pairs': dict(bias=(5, 6)),
    'bias_of_heads': dict(bias=(4, 1, 6)),
    'bias_of_all': dict(bias=(2, 4, 5, 6)) | PER_HEAD,
}


@pytest.fixture(autouse=True)
def _chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, 'chunk_on', lambda device: 2 * 2 * 4 * 6)


every_softmax = pytest.mark.parametrize('backend', ['chunked', pytest.param('native', marks=needs_native)])


@every_softmax
@pytest.mark.parametrize('learnt', [False, True], ids=['fixed', 'learnt'])
@pytest.mark.parametrize(
    'name, position, residual',
    zip(CHUNKED, cycle(['pre_softmax', 'post_softmax']), cycle([True, False, False]), strict=False),
)
def test_chunks_are_the_whole(name: str, position: str, residual: bool, learnt: bool, backend: str) -> None:
    """Outputs and all gradients, those of a learnt bias and of the gate's scalars as well."""
    if backend == 'native' and learnt and 'bias' in name:
        pytest.skip('it has no gradient of the bias')
    gate = GatingModulation(activation='tanh', init='paper').double()
    tensors = make(torch.float64, **CHUNKED[name])
    differentiable = range(len(tensors) if learnt else 5)

    def run(backend: str) -> dict[str, Tensor]:
        def attend(*x: Tensor) -> Tensor:
            options: dict[str, Any] = dict(residual=residual, position=position, backend=backend)
            return plug_attention(*x[:5], gate, *x[5:], **options)

        gate.zero_grad()
        found = values_and_gradients(attend, list(tensors.values()), differentiable)
        return found | {name: x.grad for name, x in gate.named_parameters()}

    assert_same(run(backend), run('torch'), rtol=1e-9, atol=1e-10)


@every_softmax
@pytest.mark.parametrize('narrow', [None, torch.bfloat16], ids=str)
def test_chunks_compute_in_the_dtype_of_autocast(narrow: torch.dtype | None, backend: str) -> None:
    gate, tensors = GatingModulation(init='paper'), make(torch.float32)
    wide = {name: x.double() for name, x in tensors.items()}
    expected = plug_attention(*wide.values(), copy.deepcopy(gate).double(), backend='torch')
    with torch.autocast('cpu', narrow or torch.bfloat16, enabled=narrow is not None):
        found = plug_attention(*tensors.values(), gate, backend=backend)
    assert found.dtype == (narrow or torch.float32)
    largest = float(expected.detach().abs().max())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=8 * largest * torch.finfo(found.dtype).eps)


@every_softmax
def test_a_second_derivative_is_refused(backend: str) -> None:
    """It would lack the part through the queries and keys that are saved."""
    gate = GatingModulation(init='paper').double()
    query, *others = (x.requires_grad_() for x in make(torch.float64).values())
    output = plug_attention(query.sin(), *others[:4], gate, backend=backend)
    (gradient,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
    with pytest.raises(UnsupportedCall, match='first derivatives alone'):
        gradient.square().sum().backward()


class Host(nn.Module):
    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.gate = gate

    def forward(self, backend: str, tensors: dict[str, Tensor]) -> Tensor:
        return plug_attention(**tensors, modulation=self.gate, backend=backend)


@pytest.mark.parametrize('learnt', [False, True], ids=['fixed', 'learnt'])
def test_chunks_formed_anew_have_the_same_gate(learnt: bool) -> None:
    """Of a gate that is frozen in part, exchanged for the call, and in part a plain attribute as FSDP leaves it."""
    gate, tensors = GatingModulation('mlp', init='paper').double(), make(torch.float64, bias=(5, 6))
    tensors['bias'].requires_grad_(learnt)
    given = {f'gate.{name}': torch.randn_like(x).requires_grad_() for name, x in gate.named_parameters()}
    given['gate.hidden_weight'].requires_grad_(False)
    flat = given.pop('gate.bias')
    del gate.bias
    gate.bias = flat[:]
    sought = [flat, *(x for x in given.values() if x.requires_grad)]

    def run(backend: str) -> dict[str, Tensor]:
        output = functional_call(Host(gate), given, (backend, tensors))
        grads = torch.autograd.grad(output.square().sum(), sought, retain_graph=True)
        return dict(zip(map(str, range(3)), grads, strict=True))

    assert_same(run('chunked'), run('torch'), rtol=1e-9, atol=1e-10)


def test_chunks_run_without_numbers() -> None:
    """On 'meta', where models are counted, and which autocast does not know."""
    tensors = {name: x.to('meta').requires_grad_() for name, x in make().items()}
    output = plug_attention(**tensors, modulation=GatingModulation().to('meta'), backend='chunked')
    output.sum().backward()
    assert output.shape == SHAPES['query']
    assert {name: x.grad.shape for name, x in tensors.items()} == SHAPES


def test_chunks_formed_anew_drop_the_same_weights() -> None:
    """The output is linear in the values, and its gradient says so."""
    tensors = make(torch.float64)
    value = tensors['value'].requires_grad_()
    output = plug_attention(**tensors, modulation=torch.tanh, dropout=0.5, backend='chunked')
    (gradient,) = torch.autograd.grad(output.sum(), value)
    torch.testing.assert_close((gradient * value).sum(), output.sum())
    assert not torch.allclose(plug_attention(**tensors, modulation=torch.tanh), output)


@needs_native
def test_the_loop_refuses_what_it_does_not_have() -> None:
    """By name; 'auto' goes on with chunks by torch's operators."""
    tensors = make(bias=(5, 6))
    tensors['bias'].requires_grad_()
    wanted = 'a bias that needs a gradient; gates that are functions. Use .chunked.'
    with pytest.raises(UnsupportedCall, match=f'does not have dropout=0.5; {wanted}'):
        plug_attention(**tensors, modulation=torch.tanh, dropout=0.5, backend='native')
    with pytest.raises(UnsupportedCall, match='tensors without numbers'), FakeTensorMode() as fake:
        given = {name: fake.from_tensor(x) for name, x in make().items()}
        plug_attention(**given, modulation=GatingModulation(), backend='native')
    (gradient,) = torch.autograd.grad(plug_attention(**tensors, modulation=torch.tanh).sum(), tensors['bias'])
    assert gradient.any()


@needs_native
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
def test_a_gate_of_another_dtype(dtype: torch.dtype) -> None:
    """The loop and torch read the same factor, in the dtype of the chunk."""
    gate = GatingModulation(init='paper').double()
    tensors = [x.requires_grad_() for x in make(dtype).values()]

    def run(backend: str) -> dict[str, Tensor]:
        return values_and_gradients(lambda *x: plug_attention(*x, gate, backend=backend), tensors, range(5))

    assert_same(run('native'), run('chunked'), rtol=2e-2, atol=8 * torch.finfo(dtype).eps)


LOOPS = [pytest.param(False, id='torch'), pytest.param(True, id='native', marks=needs_native)]
by_torch_and_loop = pytest.mark.parametrize('by_loop', LOOPS)
BIASES = {'none': None, 'full': (2, 3, 5, 37), 'keys': (2, 1, 1, 37), 'rows': (1, 3, 5, 1)}


def chunk(dtype: torch.dtype, gate_heads: int, columns: int = 37, rows: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, factor and a gradient of the weights of two images and three heads."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(2, 3, rows, columns, dtype=dtype)
    factor = 1 + torch.randn(2, gate_heads, rows, columns, dtype=dtype)
    return logits, factor, torch.randn_like(logits)


def expected(logits: Tensor, factor: Tensor | None, bias: Tensor | None, grad: Tensor) -> tuple[Tensor, ...]:
    """Return the weights and the gradients of logits and factor, in float64."""
    leaves = [logits.double().clone().requires_grad_()]
    if factor is not None:
        leaves.append(factor.double().clone().requires_grad_())
    gated = leaves[0] * leaves[1] if factor is not None else leaves[0]
    weights = (gated if bias is None else gated + bias.double()).softmax(-1)
    return weights.detach(), *torch.autograd.grad(weights, leaves, grad.double())


@by_torch_and_loop
@pytest.mark.parametrize(
    'bias, gate_heads',
    [('none', 1), ('none', 3), ('none', None), ('full', 1), ('full', None), ('keys', 1), ('keys', 3), ('rows', 3)],
)
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 2e-6), (torch.float64, 1e-13)], ids=['f32', 'f64'])
def test_weights_and_gradients_equal_autograds(
    by_loop: bool, dtype: torch.dtype, tolerance: float, gate_heads: int | None, bias: str
) -> None:
    logits, factor, grad = chunk(dtype, gate_heads or 1)
    size = BIASES[bias]
    added = None if size is None else torch.randn(size, dtype=dtype)
    if added is not None and bias == 'keys':
        added[..., ::3] = -torch.inf
    of_gate = factor if gate_heads else None
    weights, *gradients = expected(logits, of_gate, added, grad)
    found = gated_softmax(logits, of_gate, added, torch.empty_like(logits), by_loop=by_loop)
    assert (found - weights).abs().max() < tolerance
    if of_gate is not None:
        delta = (grad * found).sum(-1, keepdim=True)
        given = (logits.clone(), of_gate, found, grad.clone(), delta)
        of_logits, of_factor = gated_softmax_backward(*given, by_loop=by_loop)
        assert (of_logits - gradients[0]).abs().max() < 20 * tolerance
        assert of_factor.shape == of_gate.shape
        assert (of_factor - gradients[1]).abs().max() < 20 * tolerance
    in_place = gated_softmax(logits, of_gate, added, logits, by_loop=by_loop)
    assert in_place is logits and torch.equal(in_place, found)


@needs_native
@pytest.mark.usefixtures('instructions')
@pytest.mark.parametrize('columns', [1, 31, 32, 33, 200])
def test_any_instructions_give_it(columns: int) -> None:
    logits, factor, grad = chunk(torch.float32, 1, columns)
    weights, of_logits, of_factor = expected(logits, factor, None, grad)
    found = gated_softmax(logits, factor, None, torch.empty_like(logits), by_loop=True)
    assert (found - weights).abs().max() < 2e-6
    delta = (grad * found).sum(-1, keepdim=True)
    gradients = gated_softmax_backward(logits, factor, found, grad.clone(), delta, by_loop=True)
    assert (gradients[0] - of_logits).abs().max() < 4e-5
    assert (gradients[1] - of_factor).abs().max() < 4e-5


@needs_native
@pytest.mark.parametrize('own', [False, True], ids=['torchs', 'started'])
@pytest.mark.parametrize('rows', [2, 90], ids=['fewer_rows', 'more_rows'])
@pytest.mark.parametrize('gate_heads', [1, 3])
def test_any_number_of_threads_gives_the_same_bits(
    gate_heads: int, rows: int, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, 'OWN_THREADS', own)
    logits, factor, grad = chunk(torch.float32, gate_heads, 20_000 // rows, rows)
    delta = torch.randn(2, 3, rows, 1)
    before = torch.get_num_threads()
    results = []
    try:
        for number in (1, 7):
            torch.set_num_threads(number)
            found = gated_softmax(logits, factor, None, torch.empty_like(logits), by_loop=True)
            results.append((found, *gated_softmax_backward(logits, factor, found, grad.clone(), delta, by_loop=True)))
    finally:
        torch.set_num_threads(before)
    for one, seven in zip(*results, strict=True):
        assert torch.equal(one, seven)


@needs_native
@pytest.mark.usefixtures('instructions')
@pytest.mark.parametrize('gate_heads', [1, 3])
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 2e-6), (torch.float64, 1e-13)], ids=['f32', 'f64'])
def test_the_factor_is_formed_from_raw_gates(dtype: torch.dtype, tolerance: float, gate_heads: int) -> None:
    """Small, saturated and infinite ones as well as a gate that is no number, which spoils its row alone."""
    logits, raw, _ = chunk(dtype, gate_heads, columns=100)
    raw[..., :8] = torch.tensor([0.0, 1e-30, -1e-30, 1e-4, 30.0, -30.0, torch.inf, 1e15])
    raw[0, 0, 1, 9] = torch.nan
    scalars = (0.5, -0.25, 1.5, 0.125)
    a, b, c, e = scalars
    gates = ((a * raw + b) * (c * raw + e)).tanh()
    whole = (logits.double() * (1 + gates.double())).softmax(-1)
    found = gated_softmax(logits, raw, None, torch.empty_like(logits), scalars, by_loop=True)
    assert torch.equal(found.isnan(), whole.isnan()) and found.isnan().any() and not found.isnan().all()
    assert (found - whole).nan_to_num().abs().max() < tolerance
    assert (raw - (1 + gates)).nan_to_num().abs().max() < tolerance


@by_torch_and_loop
@pytest.mark.parametrize('value', [torch.nan, torch.inf, -torch.inf])
def test_a_logit_that_is_no_number_or_infinite_spoils_its_row_alone(by_loop: bool, value: float) -> None:
    logits, _, _ = chunk(torch.float32, 1)
    logits[0, 1, 2, 5] = value
    found = gated_softmax(logits, None, None, torch.empty_like(logits), by_loop=by_loop)
    whole = logits.softmax(-1)
    assert torch.equal(found.isnan(), whole.isnan())
    torch.testing.assert_close(found, whole, equal_nan=True)
