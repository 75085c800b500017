"""The SDPA gate against its equations written out, with positions and masks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.equations import B, C, Call, D, H, N, opened, split
from helpers.gated import gated_attention
from torch import Tensor, nn

import mmgate
from mmgate.errors import ConfigError
from mmgate.gates import SDPAGate, SDPAGatedMultiheadAttention
from mmgate.rules import read_rules


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


@torch.no_grad()
@pytest.mark.parametrize('position', ['G1', 'G2', 'G3', 'G4', 'G5'])
def test_a_narrow_gate_reads_the_first_channels_alone(position: str) -> None:
    """It is the wide gate whose other weights are 0, and has no weight for the other channels."""
    narrow = opened(SDPAGatedMultiheadAttention(C, H, batch_first=True, position=position, gate_channels=3))
    wide = opened(SDPAGatedMultiheadAttention(C, H, batch_first=True, position=position))
    state = narrow.state_dict()
    assert narrow.attn.gate.gate_weight.shape == (C, 3)
    padded = torch.cat([state['attn.gate.gate_weight'], torch.zeros(C, C - 3)], 1)
    wide.load_state_dict(state | {'attn.gate.gate_weight': padded})
    call = Call(narrow)
    torch.testing.assert_close(call.run(narrow), call.run(wide))


def test_a_narrow_gate_starts_as_a_linear_layer_of_its_channels() -> None:
    weights = torch.cat([SDPAGatedMultiheadAttention(64, 4, gate_channels=4).attn.gate.gate_weight for _ in range(20)])
    assert 0.49 < weights.abs().max() <= 0.5


def test_a_narrow_gate_is_saved_and_loaded_with_its_rule(tmp_path: Path) -> None:
    """A file of gates brings the option along; a gate of other channels does not take the weights."""
    model, other = (nn.TransformerEncoderLayer(C, H, 8, batch_first=True) for _ in range(2))
    other.load_state_dict(model.state_dict())
    mmgate.swap_attention(model, read_rules('self_attn=SDPAGatedMultiheadAttention(gate_channels=5)'))
    mmgate.save_gates(model, tmp_path / 'gates.safetensors')
    mmgate.load_gates(other, tmp_path / 'gates.safetensors')
    x = torch.randn(B, N, C)
    assert other.self_attn.gate.gate_channels == 5 and torch.equal(other.eval()(x), model.eval()(x))
    for channels in (None, 4, 6):
        with pytest.raises(ConfigError, match='Set gate_channels=5 for this checkpoint'):
            gated_attention(SDPAGate, C, H, gate_channels=channels).load_state_dict(model.self_attn.state_dict())
    with pytest.raises(RuntimeError, match='size mismatch'):
        gated_attention(SDPAGate, 4, 2).load_state_dict(model.self_attn.state_dict())
