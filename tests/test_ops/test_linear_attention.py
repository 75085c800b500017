"""Linear attentions: each is the N x N form of its formula, in float64, and has its gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import half_on_cpu
from torch import Tensor

from mmgate.ops import linear_attention as ops

B, H, N, D = 2, 3, 12, 8
HEADS = (B, H, N, D)


def rotated(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = q.exp(), k.exp()
        return function(ops.rotate(q, (3, 4)), ops.rotate(k, (3, 4)), v, q, k)

    return run


FORMS = {
    'kernel': (ops.kernel_attention, ops.kernel_attention_reference, HEADS, 'positive'),
    'rotary': (rotated(ops.kernel_attention), rotated(ops.kernel_attention_reference), HEADS, ''),
    'hydra': (ops.hydra_attention, ops.hydra_attention_reference, (B, N, D), ''),
    'efficient': (ops.efficient_attention, ops.efficient_attention_reference, HEADS, ''),
    'angular': (ops.linear_angular_attention, ops.linear_angular_attention_reference, HEADS, ''),
    'polarity': (ops.polarity_attention, ops.polarity_attention_reference, HEADS, 'power'),
    'inline': (ops.inline_attention, ops.inline_attention_reference, HEADS, ''),
}


@pytest.mark.parametrize('linear, reference, shape, extra', FORMS.values(), ids=FORMS)
def test_linear_is_quadratic(
    linear: Callable[..., Tensor], reference: Callable[..., Tensor], shape: tuple[int, ...], extra: str
) -> None:
    inputs = list(torch.randn(3, *shape, dtype=torch.float64))
    if extra == 'positive':
        inputs[0], inputs[1] = inputs[0].abs(), inputs[1].abs()
    if extra == 'power':
        inputs.append(1 + 4 * torch.rand(1, H, 1, D, dtype=torch.float64))
    torch.testing.assert_close(linear(*inputs), reference(*inputs), rtol=1e-9, atol=1e-9)
    assert torch.autograd.gradcheck(linear, [x.requires_grad_() for x in inputs], fast_mode=True)


@pytest.mark.parametrize('power', [2.0, 3.0])
def test_focused_features(power: float) -> None:
    """The length stays, the direction is that of the power."""
    x = torch.rand(2, 5, D, dtype=torch.float64) + 0.1
    out = ops.focused_features(x, power)
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(
        torch.nn.functional.normalize(out, dim=-1), torch.nn.functional.normalize(x**power, dim=-1)
    )
    assert torch.autograd.gradcheck(lambda t: ops.focused_features(t, power), [x.requires_grad_()])


def test_rank_augmented_keys_sum_to_the_tokens() -> None:
    q, k = torch.rand(2, B, H, N, D, dtype=torch.float64)
    alpha = ops.rank_augmented_keys(q, k) / k
    torch.testing.assert_close(alpha, alpha[..., :1].expand_as(alpha))
    expected = (q.mean(-2, keepdim=True) @ k.mT / D**0.5).softmax(-1) * N
    torch.testing.assert_close(alpha[..., 0], expected[..., 0, :])
    assert torch.autograd.gradcheck(ops.rank_augmented_keys, [t[:1, :, :4].clone().requires_grad_() for t in (q, k)])


def test_rotation_tells_relative_positions() -> None:
    """Products depend on the difference of rows and of columns alone, and lengths stay."""
    q, k = torch.randn(2, D, dtype=torch.float64)
    shape = (4, 5)
    rotated_q, rotated_k = (ops.rotate(t.expand(1, 1, 20, D), shape)[0, 0] for t in (q, k))
    products = (rotated_q @ rotated_k.T).view(*shape, *shape)
    torch.testing.assert_close(products[0, 1, 2, 4], products[1, 0, 3, 3])
    torch.testing.assert_close(rotated_q.norm(dim=-1), q.norm().expand(20))
    assert not torch.isclose(products[0, 0, 0, 1], products[0, 0, 1, 0])


def test_polarity_of_zero_has_a_gradient() -> None:
    x, power = torch.zeros(1, 1, 3, 4, requires_grad=True), torch.full((1, 1, 1, 4), 2.0, requires_grad=True)
    positive, negative = ops.polarity_features(x, power)
    (positive.sum() + negative.sum()).backward()
    assert positive.eq(0).all() and x.grad is not None and power.grad is not None
    assert x.grad.isfinite().all() and power.grad.isfinite().all()


@half_on_cpu
@pytest.mark.parametrize('name', ['kernel', 'hydra', 'efficient', 'angular', 'inline'])
def test_many_tokens_stay_in_half_precision(name: str) -> None:
    linear, _, shape, _ = FORMS[name]
    q, k, v = (torch.rand(3, *shape[:-2], 20_000, D) * 20).unbind()
    exact, half = linear(q.double(), k.double(), v.double()), linear(q.half(), k.half(), v.half())
    assert half.dtype is torch.float16 and half.isfinite().all()
    assert (half - exact).norm() / exact.norm() < 0.05


@half_on_cpu
@pytest.mark.parametrize('size', [1e-2, 1.0, 1e4])
def test_wide_features_of_any_length_beside_half_precision(size: float) -> None:
    """Powers leave the range of half precision either way; the weights hardly depend on the features' length."""
    q, k, v = torch.rand(3, *HEADS).double()
    exact = ops.kernel_attention(q * size, k * size, v)
    half = ops.kernel_attention(q.float() * size, k.float() * size, v.half())
    assert half.dtype is torch.float16
    torch.testing.assert_close(half.double(), exact, rtol=0, atol=0.01)
