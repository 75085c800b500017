"""The SDPA gate against its equations written out, with positions and masks."""

from __future__ import annotations

import pytest
import torch
from helpers.equations import B, C, Call, D, H, N, opened, split
from torch import Tensor

from mmgate.layers import SDPAGatedMultiheadAttention


@torch.no_grad()
@pytest.mark.parametrize('form', ['multiplicative', 'additive'])
@pytest.mark.parametrize('act', ['sigmoid', 'silu', 'ns_sigmoid'])
@pytest.mark.parametrize('position', ['G1', 'G2', 'G3', 'G4', 'G5'])
def test_sdpa_gate_is_its_equation_at_each_position(position: str, act: str, form: str) -> None:
    """With a scale that is not the default; each position reads its own input."""
    options = dict(position=position, act=act, form=form, scale=1.7)
    layer = opened(SDPAGatedMultiheadAttention(C, H, batch_first=True, **options))
    call = Call(layer)
    source = call.inputs[{'G1': 0, 'G2': 2, 'G3': 1, 'G4': 0, 'G5': 0}[position]]
    score = source @ layer.attn.gate.gate_weight.T + layer.attn.gate.gate_bias
    score = {
        'sigmoid': 1 / (1 + (-score).exp()),
        'silu': score / (1 + (-score).exp()),
        'ns_sigmoid': 0.5 + 0.5 / (1 + (-score).exp()),
    }[act]

    def gated(x: Tensor, at: str) -> Tensor:
        s = 1.7 * (score if at == 'G5' else split(score))
        return x if at != position else x * s if form == 'multiplicative' else x + s

    logits = gated(call.q, 'G4') @ gated(call.k, 'G3').mT / D**0.5
    heads = gated((logits + call.bias).softmax(-1) @ gated(call.v, 'G2'), 'G1')
    expected = call.identity + gated(call.finish(layer, heads), 'G5')
    torch.testing.assert_close(call.run(layer), expected)


@torch.no_grad()
@pytest.mark.parametrize('shared', [False, 'average', 'projection'], ids=str)
@pytest.mark.parametrize('granularity', ['elementwise', 'headwise'])
def test_sdpa_gate_is_its_equation_at_each_granularity(granularity: str, shared: bool | str) -> None:
    layer = opened(SDPAGatedMultiheadAttention(C, H, batch_first=True, granularity=granularity, head_shared=shared))
    call = Call(layer)
    score = call.inputs[0] @ layer.attn.gate.gate_weight.T + layer.attn.gate.gate_bias  # (B, N, heads * channels)
    heads, channels = 1 if shared == 'projection' else H, D if granularity == 'elementwise' else 1
    score = score.sigmoid().view(B, N, heads, channels)
    if shared == 'average':
        score = sum(score[:, :, h] for h in range(H))[:, :, None] / H
    heads = (call.q @ call.k.mT / D**0.5 + call.bias).softmax(-1) @ call.v * score.transpose(1, 2)
    torch.testing.assert_close(call.run(layer), call.identity + call.finish(layer, heads))
