"""SAGA's operator in half precision."""

from __future__ import annotations

import torch
from conftest import half_on_cpu

from mmgate.ops.gated_linear import gated_linear_attention


@half_on_cpu
def test_saga_keeps_small_keys_in_half_precision() -> None:
    """1 / N on the keys alone rounds many of them to 0: an error of 4 % here."""
    q, k, v = torch.randn(3, 1, 1, 64_000, 4)
    k, v = k.abs() * 0.004, v.abs() * 0.004
    exact = gated_linear_attention(*(x.double() for x in (q, k, v)))
    half = gated_linear_attention(q.half(), k.half(), v.half())
    assert (half.double() - exact).norm() / exact.norm() < 0.01
