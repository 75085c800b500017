"""Linear attention of features: its N x N form, and half precision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import assert_same, half_on_cpu, values_and_gradients
from torch import Tensor

from mmgate.ops import gated_linear_attention, kernel_attention
from mmgate.ops.linear_attention import kernel_attention_reference


@pytest.mark.parametrize('norms', [(), ((2, 3, 5, 8), (2, 3, 7, 8))], ids=['features', 'other norms'])
def test_kernel_attention_is_its_quadratic_form(norms: tuple[tuple[int, ...], ...]) -> None:
    """Outputs and all gradients, for other numbers of queries and keys."""
    q, k, v, *others = (torch.randn(shape).double() for shape in ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6), *norms))
    drawn = [q.abs(), k.abs(), v, *(x.abs() for x in others)]
    expected = values_and_gradients(kernel_attention_reference, drawn, range(len(drawn)))
    assert_same(values_and_gradients(kernel_attention, drawn, range(len(drawn))), expected, rtol=1e-9, atol=1e-9)


@half_on_cpu
@pytest.mark.parametrize('linear', [kernel_attention, gated_linear_attention])
def test_many_tokens_stay_in_half_precision(linear: Callable[..., Tensor]) -> None:
    q, k, v = (torch.rand(3, 2, 3, 20_000, 8) * 20).unbind()
    exact, half = linear(q.double(), k.double(), v.double()), linear(q.half(), k.half(), v.half())
    assert half.dtype is torch.float16 and half.isfinite().all()
    assert (half - exact).norm() / exact.norm() < 0.05


@half_on_cpu
@pytest.mark.parametrize('size', [1e-2, 1.0, 1e4])
def test_wide_features_of_any_length_beside_half_precision(size: float) -> None:
    """Powers leave the range of half precision either way; the weights hardly depend on the features' length."""
    q, k, v = torch.rand(3, 2, 3, 12, 8).double()
    exact = kernel_attention(q * size, k * size, v)
    half = kernel_attention(q.float() * size, k.float() * size, v.half())
    assert half.dtype is torch.float16
    torch.testing.assert_close(half.double(), exact, rtol=0, atol=0.01)
