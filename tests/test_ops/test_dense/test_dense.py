"""PLuG attention in 16 bits, and the shapes that every backend refuses."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from conftest import half_on_cpu, values_and_gradients
from helpers.plug_inputs import make
from torch import Tensor, nn

from mmgate.gates import GatingModulation
from mmgate.ops import plug_attention
from mmgate.ops.dense import chunked

every_position = pytest.mark.parametrize('position', ['pre_softmax', 'post_softmax'])


@every_position
@pytest.mark.parametrize('autocast', [False, True], ids=['bfloat16', 'autocast'])
@pytest.mark.parametrize('chunk', [1 << 21, 8 * 3], ids=['whole', 'chunks'])
def test_small_gates_count_in_16_bits(
    chunk: int, autocast: bool, position: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 1 + G is 1 for all G below 0.0039."""
    monkeypatch.setattr(chunked, 'chunk_on', lambda device: chunk)
    query, key = (torch.randn(1, 1, 8, 16) * 8).bfloat16(), torch.randn(1, 1, 8, 16).bfloat16()
    value, gate_key = torch.eye(8, 16).bfloat16()[None, None], torch.ones(1, 1, 8, 4).bfloat16()
    small = torch.tensor(0.0035 / 2).bfloat16()

    def weights(gate: Tensor) -> Tensor:
        with torch.autocast('cpu', torch.bfloat16, enabled=autocast), torch.no_grad():
            gate_query = gate.expand(1, 1, 8, 4)  # the gate is twice its number
            output = plug_attention(query, key, value, gate_query, gate_key, nn.Identity(), position=position)
            return output[..., :8].float()

    factor = 1 + 2 * small.double()
    logits = (query @ key.mT / 4).double()
    exact = (logits * factor).softmax(-1) if position == 'pre_softmax' else logits.softmax(-1) * factor
    moved = (weights(small) != weights(0 * small)).float().mean()
    assert moved > 0.2, f'{moved:.0%} of the weights know of the gate'
    torch.testing.assert_close(weights(small).double(), exact, rtol=2**-6, atol=1e-3)


@half_on_cpu
@every_position
@pytest.mark.parametrize('chunk', [1 << 21, 8], ids=['whole', 'chunks'])
def test_products_beyond_half_precision(chunk: int, position: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 channels of 35 and 36 have the logit 10,080 and, before it is scaled, the product 80,640."""
    monkeypatch.setattr(chunked, 'chunk_on', lambda device: chunk)
    query, key = torch.full((1, 1, 4, 64), 35.0), torch.full((1, 1, 4, 64), 36.0)
    query[:, :, 1::2] *= -1
    tensors = [x.half() for x in (query, key, torch.randn(1, 1, 4, 64), query, key)]
    modulation = GatingModulation(activation='tanh').half()
    attend = partial(plug_attention, modulation=modulation, position=position)
    half = values_and_gradients(attend, tensors, range(5))
    assert all(x.isfinite().all() for x in half.values())
    exact = plug_attention(*(x.double() for x in tensors), modulation=modulation.double(), position=position)
    torch.testing.assert_close(half['output'].double(), exact, rtol=0.01, atol=0.01)


@pytest.mark.parametrize('backend', ['torch', 'chunked', 'triton'])
def test_heads_of_gates_and_positions_that_do_not_fit(backend: str) -> None:
    """Other shapes are refused in test_any_arguments.py."""
    of_two_heads = make(gate_query=(2, 2, 5, 3), gate_key=(2, 2, 6, 3))
    with pytest.raises(ValueError, match='gate_query must have 1 head or the 4'):
        plug_attention(**of_two_heads, modulation=torch.tanh, backend=backend)
    with pytest.raises(ValueError, match=r'bias must be .* with M = 6 as in key, got \(2, 1, 1, 5\)'):
        plug_attention(**make(bias=(2, 1, 1, 5)), modulation=torch.tanh, backend=backend)
    with pytest.raises(ValueError, match='choose one of pre_softmax, post_softmax'):
        plug_attention(**make(), modulation=torch.tanh, position='pre', backend=backend)
