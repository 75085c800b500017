"""Linear attentions in half precision and at zero; their formulas stand in test_layers/test_linear.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import half_on_cpu
from torch import Tensor

from mmgate.ops import gated_linear_attention
from mmgate.ops import linear_attention as ops

HEADS = (2, 3, 12, 8)
FORMS = {
    'kernel': ops.kernel_attention,
    'hydra': lambda q, k, v: ops.hydra_attention(q[:, 0], k[:, 0], v[:, 0]),
    'efficient': ops.efficient_attention,
    'angular': ops.linear_angular_attention,
    'inline': ops.inline_attention,
    'saga': gated_linear_attention,
}


def test_polarity_of_zero_has_a_gradient() -> None:
    x, power = torch.zeros(1, 1, 3, 4, requires_grad=True), torch.full((1, 1, 1, 4), 2.0, requires_grad=True)
    positive, negative = ops.polarity_features(x, power)
    (positive.sum() + negative.sum()).backward()
    assert positive.eq(0).all() and x.grad is not None and power.grad is not None
    assert x.grad.isfinite().all() and power.grad.isfinite().all()


@half_on_cpu
@pytest.mark.parametrize('linear', FORMS.values(), ids=FORMS)
def test_many_tokens_stay_in_half_precision(linear: Callable[..., Tensor]) -> None:
    q, k, v = (torch.rand(3, 2, 3, 20_000, 8) * 20).unbind()
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
