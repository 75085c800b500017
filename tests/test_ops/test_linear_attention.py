"""Linear attention in half precision; its numbers and gradients are tested in test_any_arguments.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import half_on_cpu
from torch import Tensor

from mmgate.ops import gated_linear_attention, kernel_attention

pytestmark = half_on_cpu


@pytest.mark.parametrize('linear', [kernel_attention, gated_linear_attention])
def test_many_tokens_stay_in_half_precision(linear: Callable[..., Tensor]) -> None:
    q, k, v = (torch.rand(3, 2, 3, 20_000, 8) * 20).unbind()
    exact, half = linear(q.double(), k.double(), v.double()), linear(q.half(), k.half(), v.half())
    assert half.dtype is torch.float16 and half.isfinite().all()
    assert (half - exact).norm() / exact.norm() < 0.05


def test_saga_keeps_small_keys_in_half_precision() -> None:
    """1 / N on the keys alone rounds many of them to 0: an error of 4 % here."""
    q, k, v = torch.randn(3, 1, 1, 64_000, 4)
    k, v = k.abs() * 0.004, v.abs() * 0.004
    exact = gated_linear_attention(*(x.double() for x in (q, k, v)))
    half = gated_linear_attention(q.half(), k.half(), v.half())
    assert (half.double() - exact).norm() / exact.norm() < 0.01


@pytest.mark.parametrize('size', [1e-2, 1.0, 1e4])
def test_wide_features_of_any_length_beside_half_precision(size: float) -> None:
    """Powers leave the range of half precision either way; the weights hardly depend on the features' length."""
    q, k, v = torch.rand(3, 2, 3, 12, 8).double()
    exact = kernel_attention(q * size, k * size, v)
    half = kernel_attention(q.float() * size, k.float() * size, v.half())
    assert half.dtype is torch.float16
    torch.testing.assert_close(half.double(), exact, rtol=0, atol=0.01)
