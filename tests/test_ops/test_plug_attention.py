"""PLuG attention's public function: what it refuses, for every backend alike."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from conftest import half_on_cpu, values_and_gradients

from mmgate.layers import GatingModulation
from mmgate.ops import plug_attention
from mmgate.ops.plug_attention import chunked

SHAPES = dict(query=(2, 4, 5, 8), key=(2, 4, 6, 8), value=(2, 4, 6, 8), gate_query=(2, 1, 5, 3), gate_key=(2, 1, 6, 3))


@pytest.mark.parametrize('backend', ['torch', 'chunked', 'triton'])
@pytest.mark.parametrize(
    'changed, message',
    [
        (dict(key=(2, 2, 6, 8), value=(2, 2, 6, 8)), r'key must be .* with H = 4 as in query, got \(2, 2, 6, 8\)'),
        (dict(gate_query=(1, 1, 5, 3), gate_key=(1, 1, 6, 3)), 'gate_query must be .* with B = 2'),
        (dict(gate_key=(2, 1, 5, 3)), 'gate_key must be .* with M = 6 as in key'),
        (dict(gate_key=(2, 4, 6, 3)), 'gate_key must be .* with G = 1 as in gate_query'),
        (dict(gate_query=(2, 2, 5, 3), gate_key=(2, 2, 6, 3)), 'gate_query must have 1 head or the 4'),
        (dict(value=(2, 4, 5, 8)), 'value must be .* with M = 6 as in key'),
        (dict(query=(4, 5, 8)), r'query must be \(B, H, N, d\)'),
        (dict(bias=(2, 1, 1, 5)), r'bias must be .* with M = 6 as in key, got \(2, 1, 1, 5\)'),
    ],
    ids=['gqa', 'gate_batch', 'gate_keys', 'gate_heads', 'odd_gate_heads', 'values', '3d', 'bias'],
)
def test_shapes_that_do_not_go_together(changed: dict, message: str, backend: str) -> None:
    tensors = {name: torch.randn(shape) for name, shape in {**SHAPES, **changed}.items()}
    with pytest.raises(ValueError, match=message):
        plug_attention(**tensors, modulation=torch.tanh, backend=backend)


def test_a_position_that_is_unknown() -> None:
    with pytest.raises(ValueError, match='choose one of pre_softmax, post_softmax'):
        plug_attention(**{n: torch.randn(s) for n, s in SHAPES.items()}, modulation=torch.tanh, position='pre')


@pytest.mark.parametrize('shape', [(6,), (5, 6), (4, 1, 6), (2, 4, 5, 6)], ids=str)
def test_a_bias_broadcasts(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, 'CHUNK', 2 * 2 * 4 * 6)
    tensors = {name: torch.randn(s, dtype=torch.float64) for name, s in SHAPES.items()}
    bias = torch.randn(shape, dtype=torch.float64)
    expected, actual = (
        plug_attention(**tensors, modulation=torch.tanh, bias=bias, backend=backend) for backend in ('torch', 'chunked')
    )
    torch.testing.assert_close(actual, expected)


@half_on_cpu
@pytest.mark.parametrize('position', ['pre_softmax', 'post_softmax'])
@pytest.mark.parametrize('chunk', [1 << 21, 8], ids=['whole', 'chunks'])
def test_products_beyond_half_precision(chunk: int, position: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 channels of 35 and 36 have the logit 10,080 and, before it is scaled, the product 80,640."""
    monkeypatch.setattr(chunked, 'CHUNK', chunk)
    query, key = torch.full((1, 1, 4, 64), 35.0), torch.full((1, 1, 4, 64), 36.0)
    query[:, :, 1::2] *= -1
    tensors = [x.half() for x in (query, key, torch.randn(1, 1, 4, 64), query, key)]
    modulation = GatingModulation(activation='tanh').half()
    attend = partial(plug_attention, modulation=modulation, position=position)
    half = values_and_gradients(attend, tensors, range(5))
    assert all(x.isfinite().all() for x in half.values())
    exact = plug_attention(*(x.double() for x in tensors), modulation=modulation.double(), position=position)
    torch.testing.assert_close(half['output'].double(), exact, rtol=0.01, atol=0.01)
