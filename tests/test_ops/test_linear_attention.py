"""Linear attentions: their N x N forms, rotations as complex numbers, half precision, and features that are zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import assert_same, half_on_cpu, values_and_gradients
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


KERNEL = (ops.kernel_attention, ops.kernel_attention_reference)
# An operator, its N x N form, and the shapes of its tensors.
SHAPES = ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6))
PAIRS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    'kernel': (*KERNEL, SHAPES),
    'kernel_of_other_norms': (*KERNEL, (*SHAPES, (2, 3, 5, 8), (2, 3, 7, 8))),
    'hydra': (ops.hydra_attention, ops.hydra_attention_reference, ((2, 5, 6), (2, 7, 6), (2, 7, 6))),
    'efficient': (ops.efficient_attention, ops.efficient_attention_reference, SHAPES),
    'angular': (ops.linear_angular_attention, ops.linear_angular_attention_reference, (SHAPES[1], *SHAPES[1:])),
    'polarity': (ops.polarity_attention, ops.polarity_attention_reference, (*SHAPES, (1, 3, 1, 4))),
    'inline': (ops.inline_attention, ops.inline_attention_reference, SHAPES),
}


@pytest.mark.parametrize('name', PAIRS)
def test_an_operator_is_its_quadratic_form(name: str) -> None:
    """Outputs and all gradients, for other numbers of queries and keys where there may be."""
    linear, quadratic, shapes = PAIRS[name]
    drawn = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    if name.startswith('kernel'):  # features
        drawn = [x if i == 2 else x.abs() for i, x in enumerate(drawn)]
    if name == 'polarity':  # a power above 1
        drawn[3] = drawn[3].abs() + 1
    expected = values_and_gradients(quadratic, drawn, range(len(drawn)))
    assert_same(values_and_gradients(linear, drawn, range(len(drawn))), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('inclusive', [False, True], ids=['MLLA', 'RALA'])
def test_pairs_are_rotated_as_complex_numbers(inclusive: bool) -> None:
    """The first half of the pairs by the row, the second by the column, each slower than the one before it."""
    x = torch.randn(2, 3 * 4, 12, dtype=torch.float64)
    powers = torch.linspace(0, 1, 3).double() if inclusive else torch.arange(3).double() / 3
    speeds = 100.0**-powers
    expected = torch.view_as_complex(x.unflatten(-1, (6, 2)).clone())
    for token in range(12):
        row, column = divmod(token, 4)
        angles = torch.cat([row * speeds, column * speeds])
        expected[:, token] *= torch.polar(torch.ones_like(angles), angles)
    rotated = ops.rotate(x, (3, 4), base=100.0, inclusive=inclusive)
    torch.testing.assert_close(rotated, torch.view_as_real(expected).flatten(-2), rtol=1e-6, atol=1e-6)


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
