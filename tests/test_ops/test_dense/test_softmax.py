"""The gated softmax of a chunk: the C++ loop and torch's operators against autograd in float64."""

from __future__ import annotations

import pytest
import torch
from conftest import needs_native
from torch import Tensor

from mmgate.ops import native
from mmgate.ops.dense.native_dense import BY_LOOP
from mmgate.ops.dense.softmax import BY_TORCH, Softmax

LOOPS = [pytest.param(BY_TORCH, id='torch'), pytest.param(BY_LOOP, id='native', marks=needs_native)]
every_softmax = pytest.mark.parametrize('softmax', LOOPS)
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


@every_softmax
@pytest.mark.parametrize(
    'bias, gate_heads',
    [('none', 1), ('none', 3), ('none', None), ('full', 1), ('full', None), ('keys', 1), ('keys', 3), ('rows', 3)],
)
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 2e-6), (torch.float64, 1e-13)], ids=['f32', 'f64'])
def test_weights_and_gradients_equal_autograds(
    softmax: Softmax, dtype: torch.dtype, tolerance: float, gate_heads: int | None, bias: str
) -> None:
    logits, factor, grad = chunk(dtype, gate_heads or 1)
    size = BIASES[bias]
    added = None if size is None else torch.randn(size, dtype=dtype)
    if added is not None and bias == 'keys':
        added[..., ::3] = -torch.inf
    of_gate = factor if gate_heads else None
    weights, *gradients = expected(logits, of_gate, added, grad)
    found = softmax.forward(logits, of_gate, added, torch.empty_like(logits))
    assert (found - weights).abs().max() < tolerance
    if of_gate is not None:
        delta = (grad * found).sum(-1, keepdim=True)
        of_logits, of_factor = softmax.backward(logits.clone(), of_gate, found, grad.clone(), delta)
        assert (of_logits - gradients[0]).abs().max() < 20 * tolerance
        assert of_factor.shape == of_gate.shape
        assert (of_factor - gradients[1]).abs().max() < 20 * tolerance
    in_place = softmax.forward(logits, of_gate, added, logits)
    assert in_place is logits and torch.equal(in_place, found)


@needs_native
@pytest.mark.usefixtures('instructions')
@pytest.mark.parametrize('columns', [1, 31, 32, 33, 200])
def test_any_instructions_give_it(columns: int) -> None:
    logits, factor, grad = chunk(torch.float32, 1, columns)
    weights, of_logits, of_factor = expected(logits, factor, None, grad)
    found = BY_LOOP.forward(logits, factor, None, torch.empty_like(logits))
    assert (found - weights).abs().max() < 2e-6
    delta = (grad * found).sum(-1, keepdim=True)
    gradients = BY_LOOP.backward(logits, factor, found, grad.clone(), delta)
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
            found = BY_LOOP.forward(logits, factor, None, torch.empty_like(logits))
            results.append((found, *BY_LOOP.backward(logits, factor, found, grad.clone(), delta)))
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
    found = BY_LOOP.forward(logits, raw, None, torch.empty_like(logits), scalars)
    assert torch.equal(found.isnan(), whole.isnan()) and found.isnan().any() and not found.isnan().all()
    assert (found - whole).nan_to_num().abs().max() < tolerance
    assert (raw - (1 + gates)).nan_to_num().abs().max() < tolerance


@every_softmax
@pytest.mark.parametrize('value', [torch.nan, torch.inf, -torch.inf])
def test_a_logit_that_is_no_number_or_infinite_spoils_its_row_alone(softmax: Softmax, value: float) -> None:
    logits, _, _ = chunk(torch.float32, 1)
    logits[0, 1, 2, 5] = value
    found = softmax.forward(logits, None, None, torch.empty_like(logits))
    whole = logits.softmax(-1)
    assert torch.equal(found.isnan(), whole.isnan())
    torch.testing.assert_close(found, whole, equal_nan=True)
