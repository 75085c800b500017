"""SAGA, and what linear attention has in common, against their equations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same, values_and_gradients
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mmgate.errors import ConfigError
from mmgate.gate import Sizes
from mmgate.gates import SAGAAttention
from mmgate.gates.base.linear import LinearGate


@pytest.mark.parametrize('qk_scale', [None, 0.9], ids=['printed', 'scaled'])
def test_saga_is_its_printed_equations(qk_scale: float | None) -> None:
    """Eq. 9 and 10, token by token: ``[Q ((K * A)^T (V * B)) + DWC(V)] * G``, and by a scale and the tokens' number."""
    layer = SAGAAttention(12, 3, map_size=(3, 5), scale_by_tokens=qk_scale is not None, qk_scale=qk_scale).double()
    factor = 1.0 if qk_scale is None else qk_scale / 15
    nn.init.normal_(layer.gate.position_encoding)
    x = torch.randn(2, 15, 12, dtype=torch.float64, requires_grad=True)

    def printed(x: Tensor) -> Tensor:
        q, k, v = layer.qkv(x).chunk(3, -1)
        gated_k = (k + layer.gate.position_encoding) * layer.gate.gate_k(x).sigmoid()
        gated_v = v * layer.gate.gate_v(x).sigmoid()
        out = torch.zeros_like(q)
        for head in (slice(0, 4), slice(4, 8), slice(8, 12)):
            out[..., head] = sum(
                torch.einsum('bnc,bc,bd->bnd', q[..., head], gated_k[:, j, head], gated_v[:, j, head])
                for j in range(15)
            )
        return layer.proj((factor * out + layer.gate.convolve(v, (3, 5))) * layer.gate.gate_out(x))

    def computed(x: Tensor) -> Tensor:
        return layer(x, (3, 5))

    results = []
    for function in (printed, computed):
        layer.zero_grad()
        results.append(values_and_gradients(function, [x], [0]))
        results[-1] |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert_same(results[1], results[0], rtol=1e-10, atol=1e-10)
    assert torch.autograd.gradcheck(computed, (x,), fast_mode=True)


PARTS = ('gate', 'dwc', 'output_augmentation', 'position_encoding')


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


@pytest.mark.parametrize('hw_shape', [(4, 4), (3, 5)], ids=str)
@pytest.mark.parametrize('part', ['', *PARTS])
def test_each_part_can_be_left_out(part: str, hw_shape: tuple[int, int]) -> None:
    """A position encoding is resized for another map; keys are scaled by 1 / N and queries by 1 / sqrt(d)."""
    layer = SAGAAttention(16, 2, map_size=(4, 4), **{name: name != part for name in PARTS}).double()
    gate = layer.gate
    x = torch.randn(2, hw_shape[0] * hw_shape[1], 16, dtype=torch.float64)
    q, k, v = layer.qkv(x).chunk(3, -1)
    local = 0
    if part != 'position_encoding':
        nn.init.normal_(gate.position_encoding)
        grid = gate.position_encoding.transpose(1, 2).unflatten(-1, (4, 4))
        k = k + F.interpolate(grid, size=hw_shape, mode='bilinear').flatten(2).transpose(1, 2)
    if part != 'dwc':  # one kernel for each channel of a head, which the heads share
        images = v.transpose(1, 2).reshape(4, 8, *hw_shape)
        local = F.conv2d(images, gate.dwc.weight, gate.dwc.bias, padding=2, groups=8)
        local = local.reshape(2, 16, -1).transpose(1, 2)
    if part != 'gate':
        k, v = k * gate.gate_k(x).sigmoid(), v * gate.gate_v(x).sigmoid()
    out = split(q) @ (split(k).mT @ split(v)) / (x.shape[1] * 8**0.5)
    out = out.transpose(1, 2).flatten(2) + local
    if part != 'output_augmentation':
        out = out * gate.gate_out(x)
    torch.testing.assert_close(layer(x, hw_shape), layer.proj(out), rtol=1e-9, atol=1e-9)
    assert layer(x[:0], hw_shape).shape == (0, *x.shape[1:])


def test_a_class_token_attends_and_is_neither_convolved_nor_placed() -> None:
    """A map's tokens in another place change what they are; the class token sees a set."""
    layer = SAGAAttention(16, 2, class_tokens=1, position_encoding=False)
    x = torch.randn(1, 1 + 16, 16)
    flipped = torch.cat([x[:, :1], x[:, 1:].flip(1)], 1)
    torch.testing.assert_close(layer(flipped, (4, 4))[:, 0], layer(x, (4, 4))[:, 0])
    assert not torch.allclose(layer(flipped, (4, 4))[:, 1:].flip(1), layer(x, (4, 4))[:, 1:], atol=1e-4)
    layer = SAGAAttention(16, 2, class_tokens=1, map_size=(4, 4))
    before = layer(x, (4, 4))
    keys = layer.gate._with_positions(layer.qkv(x).chunk(3, -1)[1], (4, 4))
    nn.init.normal_(layer.gate.position_encoding)
    moved = layer.gate._with_positions(layer.qkv(x).chunk(3, -1)[1], (4, 4)) - keys
    assert not moved[:, 0].any() and moved[:, 1:].any() and not torch.equal(layer(x, (4, 4)), before)


def test_it_costs_in_proportion_to_the_tokens() -> None:
    layer = SAGAAttention(16, 2, map_size=(4, 4))

    def cost(side: int) -> int:
        with FlopCounterMode(display=False) as counter:
            layer(torch.zeros(1, side * side, 16), (side, side))
        return counter.get_total_flops()

    assert cost(64) - cost(32) == 4 * (cost(32) - cost(16)) > 0


def test_all_of_the_gate_starts_and_nothing_else() -> None:
    layer = SAGAAttention(16, 2, map_size=(4, 4))
    for parameter in layer.parameters():
        nn.init.constant_(parameter, 7.0)
    layer.init_weights()
    assert not [key for key, parameter in layer.gate.named_parameters() if parameter.eq(7).any()]
    assert all(parameter.eq(7).all() for part in (layer.qkv, layer.proj) for parameter in part.parameters())


@pytest.mark.parametrize(
    'options, message',
    [
        (dict(attn_drop=0.1), 'SAGAGate has no attention weights to drop.*attn_drop_rate'),
        (dict(scale_by_tokens='N'), "scale_by_tokens='N' is unknown; choose one of True, False"),
        (dict(scale_by_tokens=False, qk_scale=0.9), 'scales nothing, but qk_scale=0.9'),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SAGAAttention(16, 2, map_size=(4, 4), **options)


def test_the_base_mixes_nothing() -> None:
    gate, x = LinearGate(Sizes(8, 2)), torch.randn(1, 4, 8)
    with pytest.raises(TypeError, match='LinearGate mixes no tokens; use a subclass'):
        gate.mix(x, x, x, x, (2, 2))
