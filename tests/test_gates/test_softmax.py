"""Softmax attention over a map: its formula, its scale, its class token and its dropout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmgate.gates import SoftmaxAttention

C, HEADS = 12, 3


def formula(layer: SoftmaxAttention, x: Tensor, scale: float) -> Tensor:
    """Return ``softmax(Q K^T scale) V`` of every head, projected."""
    query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in layer.qkv(x).chunk(3, -1))
    heads = (query @ key.mT * scale).softmax(-1) @ value
    return layer.proj(heads.transpose(1, 2).flatten(2))


@pytest.mark.parametrize('class_tokens', [0, 2], ids=['map', 'class_tokens'])
@pytest.mark.parametrize('qk_scale', [None, 0.3], ids=['usual_scale', 'scale'])
def test_softmax_attention_is_its_formula(qk_scale: float | None, class_tokens: int) -> None:
    layer = SoftmaxAttention(C, HEADS, qk_scale=qk_scale, class_tokens=class_tokens).double()
    x = torch.randn(2, class_tokens + 3 * 5, C, dtype=torch.float64)
    torch.testing.assert_close(layer(x, (3, 5)), formula(layer, x, qk_scale or (C // HEADS) ** -0.5))
