"""M-DGSA against its equation written out, with positions and masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.equations import C, Call, D, H, linear, normed, opened
from helpers.gated import gated_attention

from mmgate.gates import DGSAGate, DifferentialGatedMultiheadAttention


@torch.no_grad()
@pytest.mark.parametrize(
    'options',
    [{}, dict(residual='input'), dict(residual='none'), dict(gate_depth=3), dict(learnable=True)],
    ids=str,
)
def test_m_dgsa_is_its_equation(options: dict[str, Any]) -> None:
    """M-DGSA: ``g A+ - (1 - g) A-``, each stream of half a head's width; A.5's deeper gate and learnt lambda."""
    layer = opened(DifferentialGatedMultiheadAttention(C, H, batch_first=True, lambda_init=0.6, **options))
    assert gated_attention(DGSAGate, C, H, learnable=True).gate.lambda_init.tolist() == [pytest.approx(0.8)]
    call = Call(layer)
    plus, minus = (
        (q @ k.mT / (D / 2) ** 0.5 + call.bias).softmax(-1)
        for q, k in zip(call.q.chunk(2, -1), call.k.chunk(2, -1), strict=True)
    )
    hidden = call.inputs[0]
    for before in layer.attn.gate.gate_hidden:
        hidden = F.gelu(linear(before, hidden))
    gate = linear(layer.attn.gate.gate_proj, hidden).sigmoid().transpose(1, 2)[..., None]
    share = 1 - (layer.attn.gate.lambda_init if 'learnable' in options else 0.6)
    heads = normed((gate * plus - (1 - gate) * minus) @ call.v, layer.attn.gate.head_norm.weight) * share
    queries = call.q.transpose(1, 2).flatten(2)
    added = {'query': queries, 'input': call.inputs[0], 'none': 0}[options.get('residual', 'query')]
    torch.testing.assert_close(call.run(layer), call.identity + call.finish(layer, heads) + added)
