"""The differential transformer against its equation written out, with positions and masks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.equations import C, Call, D, H, normed, opened

from mmgate.layers import DifferentialMultiheadAttention


@torch.no_grad()
@pytest.mark.parametrize(
    'options, start',
    [(dict(depth=3), 0.8 - 0.6 * math.exp(-0.6)), (dict(lambda_init=0.5), 0.5), (dict(learnable=False), 0.2)],
    ids=str,
)
def test_differential_attention_is_its_equation(options: dict[str, Any], start: float) -> None:
    layer = opened(DifferentialMultiheadAttention(C, H, batch_first=True, **options))
    call, gate = Call(layer), layer.attn.gate
    first, second = (
        (q @ k.mT / (D / 2) ** 0.5 + call.bias).softmax(-1) @ call.v
        for q, k in zip(call.q.chunk(2, -1), call.k.chunk(2, -1), strict=True)
    )
    weight = start
    if options.get('learnable', True):
        weight = math.exp(gate.lambda_q1 @ gate.lambda_k1) - math.exp(gate.lambda_q2 @ gate.lambda_k2) + start
    heads = normed(first - weight * second, gate.head_norm.weight) * (1 - start)
    torch.testing.assert_close(call.run(layer), call.identity + call.finish(layer, heads))
