"""PLuG attention in 16 bits, without keys, and the shapes that every backend refuses."""

from __future__ import annotations

import pytest
import torch
from conftest import half_on_cpu, needs_native
from helpers.pairs import attend, make, solved
from torch import Tensor, nn

from mmgate.ops.dense import chunked
from mmgate.ops.dense.reference import Pairs

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
            output = attend(Pairs(query, key, value, gate_query, gate_key, nn.Identity(), position=position))
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
    given = make(heads=1, rows=4, columns=4, dim=64, width=64, position=position)
    for x, size in ((given.query, 35), (given.key, 36), (given.gate_query, 35), (given.gate_key, 36)):
        x.fill_(size)
        x[:, :, 1::2] *= 1 if size == 36 else -1
    half = solved(given, 'auto', torch.float16)
    assert all(x.isfinite().all() for x in half.values())
    exact = solved(given._replace(value=given.value.half()), 'torch', torch.float64)
    torch.testing.assert_close(half['output'].double(), exact['output'], rtol=0.01, atol=0.01)


NATIVE = pytest.param('native', marks=needs_native)
every_backend = pytest.mark.parametrize('backend', ['torch', 'chunked', NATIVE, 'triton'], indirect=True)


@every_backend
@pytest.mark.usefixtures('poisoned_memory')
def test_no_keys_give_zeros(backend: str) -> None:
    found = solved(make(columns=0), backend)
    assert not found['output'].any() and all(x.isfinite().all() for x in found.values())


@every_backend
def test_heads_of_gates_and_positions_that_do_not_fit(backend: str) -> None:
    """Other shapes are refused in test_any_arguments.py."""
    with pytest.raises(ValueError, match='gate_query must have 1 head or the 4'):
        attend(make(heads=4, gates=2), backend)
    with pytest.raises(ValueError, match=r'bias must be .* with M = 21 as in key, got \(2, 1, 1, 5\)'):
        attend(make()._replace(bias=torch.zeros(2, 1, 1, 5)), backend)
    with pytest.raises(ValueError, match='choose one of pre_softmax, post_softmax'):
        attend(make(position='pre'), backend)
