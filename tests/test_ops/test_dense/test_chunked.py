"""PLuG attention in chunks, by torch's operators or the C++ loop: they are the whole, also when formed anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import needs_native
from helpers.pairs import attend, make, problems, solved
from helpers.samplings import compare
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from mmgate.errors import UnsupportedCall
from mmgate.gates import GatingModulation
from mmgate.ops import native
from mmgate.ops.dense import chunked
from mmgate.ops.dense.reference import Pairs


@pytest.fixture(autouse=True)
def _chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, 'chunk_on', lambda device: 1500)


NATIVE = pytest.param('native', marks=needs_native)
every_softmax = pytest.mark.parametrize('backend', ['chunked', NATIVE])


def assert_problems_are_solved(backend: str) -> None:
    """In outputs and gradients; masks of whole blocks, biases of fewer axes and every gate are among them."""
    for name, given, expected in problems():
        for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 3e-4)):
            found = solved(given, backend, dtype)
            compare(found, {x: expected[x] for x in found}, tolerance, f'{name} {dtype}', least=0.1)


@pytest.mark.parametrize('backend', ['torch', 'chunked'])
def test_random_problems_equal_a_float64_program(backend: str) -> None:
    assert_problems_are_solved(backend)


@needs_native
@pytest.mark.usefixtures('poisoned_memory', 'threads', 'instructions')
def test_random_problems_equal_a_float64_program_by_the_loop() -> None:
    assert_problems_are_solved('native')


@every_softmax
@pytest.mark.parametrize('narrow', [None, torch.bfloat16], ids=str)
def test_chunks_compute_in_the_dtype_of_autocast(narrow: torch.dtype | None, backend: str) -> None:
    """Also those of a gate of another dtype."""
    given = make()._replace(modulation=make().modulation.double())
    expected = solved(given, 'torch', torch.float64)
    query = given.query.requires_grad_()
    with torch.autocast('cpu', narrow or torch.bfloat16, enabled=narrow is not None):
        found = attend(given, backend)
    assert found.dtype == (narrow or torch.float32)
    noise = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (gradient,) = torch.autograd.grad((found.double() * noise).sum(), query)
    for actual, right, steps in ((found, expected['output'], 8), (gradient, expected['query'], 32)):
        step = float(right.abs().max()) * torch.finfo(found.dtype).eps
        torch.testing.assert_close(actual.double(), right, rtol=0, atol=steps * step)


@every_softmax
def test_a_second_derivative_is_refused(backend: str) -> None:
    """It would lack the part through the queries and keys that are saved. First ones may be changed, as by clipping."""
    query, *others = (x.requires_grad_() for x in make(dtype=torch.float64)[:5])
    others[0].register_hook(lambda grad: grad.clamp_(-1, 1))
    given = Pairs(query.sin(), *others, make().modulation.double())
    total = attend(given, backend).square().sum()
    gradient, clipped = torch.autograd.grad(total, (query, others[0]), create_graph=True)
    assert clipped.abs().max() == 1
    with pytest.raises(UnsupportedCall, match='first derivatives alone'):
        gradient.square().sum().backward()


@pytest.mark.parametrize('learnt', [False, True], ids=['fixed', 'learnt'])
def test_chunks_formed_anew_have_the_same_gate(learnt: bool) -> None:
    """Of a gate that is frozen in part, exchanged for the call, and in part a plain attribute as FSDP leaves it."""
    gate, given = GatingModulation('mlp', init='paper'), make(bias='11nm')
    given.bias.requires_grad_(learnt)
    tensors = {f'gate.{name}': torch.randn_like(x).requires_grad_() for name, x in gate.named_parameters()}
    tensors['gate.hidden_weight'].requires_grad_(False)
    flat = tensors.pop('gate.bias')
    del gate.bias
    gate.bias = flat[:]
    sought = dict(flat=flat, **{name: x for name, x in tensors.items() if x.requires_grad})

    host = nn.ModuleDict(dict(gate=gate))
    host.forward = lambda backend: attend(given._replace(modulation=gate), backend)

    def run(backend: str) -> dict[str, Tensor]:
        output = functional_call(host, tensors, (backend,))
        grads = torch.autograd.grad(output.square().sum(), [*sought.values()], retain_graph=True)
        return dict(zip(sought, grads, strict=True))

    compare(run('chunked'), run('torch'), 1e-4)


def test_chunks_run_without_numbers() -> None:
    """On 'meta', where models are counted, and which autocast does not know."""
    given = make('meta')
    query = given.query.requires_grad_()
    attend(given, 'chunked').sum().backward()
    assert query.grad.shape == query.shape


def test_chunks_formed_anew_drop_the_same_weights() -> None:
    """The output is linear in the values, and its gradient says so."""
    given = make(dropout=0.5)
    value = given.value.requires_grad_()
    output = attend(given, 'chunked')
    (gradient,) = torch.autograd.grad(output.sum(), value)
    torch.testing.assert_close((gradient * value).sum(), output.sum(), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(attend(given._replace(dropout=0.0)), output)


@needs_native
def test_the_loop_refuses_what_it_does_not_have() -> None:
    """By name; 'auto' goes on with chunks by torch's operators."""
    given = make(bias='11nm', dropout=0.5)._replace(modulation=torch.tanh)
    given.bias.requires_grad_()
    wanted = 'a bias that needs a gradient; gates that are functions. Use .chunked.'
    with pytest.raises(UnsupportedCall, match=f'does not have dropout=0.5; {wanted}'):
        attend(given, 'native')
    (gradient,) = torch.autograd.grad(attend(given).sum(), given.bias)
    assert gradient.any()
    given = make()
    with pytest.raises(UnsupportedCall, match='tensors without numbers'), FakeTensorMode() as fake:
        attend(given._replace(**{name: fake.from_tensor(getattr(given, name)) for name in given._fields[:5]}), 'native')


@needs_native
@pytest.mark.parametrize('own', [False, True], ids=['torchs', 'started'])
@pytest.mark.parametrize('rows, gates', [(2, 1), (90, 3)], ids=['fewer_rows', 'more_rows'])
def test_any_number_of_threads_gives_the_same_bits(
    rows: int, gates: int, own: bool, set_threads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, 'OWN_THREADS', own)
    monkeypatch.setattr(chunked, 'chunk_on', lambda device: 20_000)
    given = make(heads=3, gates=gates, rows=2 * rows, columns=3000 // rows)
    set_threads(1)
    one = solved(given, 'native')
    set_threads(7)
    assert all(torch.equal(one[name], x) for name, x in solved(given, 'native').items())


@every_softmax
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 2e-6), (torch.float64, 1e-13)], ids=['f32', 'f64'])
@pytest.mark.parametrize('heads', [1, 3], ids=['shared', 'per_head'])
@pytest.mark.usefixtures('instructions')
def test_what_is_no_number_spoils_its_row_alone(heads: int, dtype: torch.dtype, tolerance: float, backend: str) -> None:
    """A gate, a logit or a bias; beside it small, saturated and infinite gates are what they are in float64."""
    given = make(heads=3, gates=heads, rows=12, columns=100, width=1, bias='bhnm', dtype=dtype)
    raw = [0.0, 1e-30, -1e-30, 1e-4, 30.0, -30.0, torch.inf, 1e15, torch.nan]
    given.gate_query[:, :, :9, 0] = torch.tensor(raw, dtype=dtype)
    given.gate_key.abs_()
    given.query[0, 1, 0, 0] = torch.nan
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        given.bias[1, 2, row, 5] = value
    exact = given._replace(**{x: getattr(given, x).double() for x in (*given._fields[:5], 'bias')})
    found, expected = attend(given, backend), attend(exact._replace(modulation=make().modulation.double()), 'torch')
    assert torch.equal(found.isnan().any(-1), expected.isnan().any(-1)) and not expected.isnan().all()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance, equal_nan=True)
