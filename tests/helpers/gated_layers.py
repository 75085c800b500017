"""A model of two layers of attention with gates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import mmgate

HEADS, TOKENS = 2, 6

PLUG, SDPA = dict(type='PLuGMultiheadAttention'), dict(type='SDPAGatedMultiheadAttention')


class Model(nn.ModuleList):
    """Two layers of attention that take a batch as detectors do."""

    def test_step(self, batch: Tensor) -> list[Tensor]:
        for layer in self:
            batch = layer(batch, batch, batch)[0]
        return [batch]


def gated(options: dict[str, Any]) -> tuple[nn.Module, list[Tensor]]:
    model = Model(nn.MultiheadAttention(8, HEADS, batch_first=True) for _ in range(2))
    mmgate.swap_attention(model, dict(options, path='*'))
    return model.eval(), [torch.randn(1, TOKENS, 8) for _ in range(3)]
