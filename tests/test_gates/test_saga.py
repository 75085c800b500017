"""SAGA, and what linear attention has in common, against their equations."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same, values_and_gradients
from torch import Tensor, nn

from mmgate.gates import SAGAAttention

PARTS = ('gate', 'dwc', 'output_augmentation', 'position_encoding')
CASES: list[tuple[dict[str, Any], tuple[int, int]]] = [
    (dict(scale_by_tokens=False), (4, 4)),  # as it is printed
    (dict(qk_scale=0.9), (4, 4)),
    ({}, (3, 5)),
    *(({part: False}, hw_shape) for part, hw_shape in zip(PARTS, cycle([(3, 5), (4, 4)]), strict=False)),
]


@pytest.mark.parametrize('options, hw_shape', CASES, ids=str)
def test_saga_is_its_printed_equations(options: dict[str, Any], hw_shape: tuple[int, int]) -> None:
    """Eq. 9 and 10, token by token: ``[Q ((K * A)^T (V * B)) + DWC(V)] * G``, with scales, and without each part.

    A position encoding is resized for another map; keys are scaled by 1 / N and queries by 1 / sqrt(d).
    """
    layer = SAGAAttention(16, 2, map_size=(4, 4), **options).double()
    gate = layer.gate
    count = hw_shape[0] * hw_shape[1]
    factor = 1.0 if 'scale_by_tokens' in options else options.get('qk_scale', 8**-0.5) / count
    if gate.position_encoding is not None:
        nn.init.normal_(gate.position_encoding)

    def printed(x: Tensor) -> Tensor:
        q, k, v = layer.qkv(x).chunk(3, -1)
        local: Any = 0
        if 'dwc' not in options:  # one kernel for each channel of a head, which the heads share
            images = v.transpose(1, 2).reshape(4, 8, *hw_shape)
            local = F.conv2d(images, gate.dwc.weight, gate.dwc.bias, padding=2, groups=8)
            local = local.reshape(2, 16, -1).transpose(1, 2)
        if 'position_encoding' not in options:
            grid = gate.position_encoding.transpose(1, 2).unflatten(-1, (4, 4))
            k = k + F.interpolate(grid, size=hw_shape, mode='bilinear').flatten(2).transpose(1, 2)
        if 'gate' not in options:
            k, v = k * gate.gate_k(x).sigmoid(), v * gate.gate_v(x).sigmoid()
        heads = [
            sum(torch.einsum('bnc,bc,bd->bnd', q[..., h], k[:, j, h], v[:, j, h]) for j in range(count))
            for h in (slice(0, 8), slice(8, 16))
        ]
        out = factor * torch.cat(heads, -1) + local
        return layer.proj(out if 'output_augmentation' in options else out * gate.gate_out(x))

    def computed(x: Tensor) -> Tensor:
        return layer(x, hw_shape)

    x = torch.randn(2, count, 16, dtype=torch.float64, requires_grad=True)
    results = []
    for function in (printed, computed):
        layer.zero_grad()
        results.append(values_and_gradients(function, [x], [0]))
        results[-1] |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert_same(results[1], results[0], rtol=1e-9, atol=1e-9)
    assert torch.autograd.gradcheck(computed, (x,), fast_mode=True)
    assert layer(x[:0], hw_shape).shape == (0, count, 16)


def test_a_class_token_attends_and_is_not_convolved() -> None:
    """A map's tokens in another place change what they are; the class token sees a set."""
    layer = SAGAAttention(16, 2, class_tokens=1, position_encoding=False)
    x = torch.randn(1, 1 + 16, 16)
    flipped = torch.cat([x[:, :1], x[:, 1:].flip(1)], 1)
    torch.testing.assert_close(layer(flipped, (4, 4))[:, 0], layer(x, (4, 4))[:, 0])
    assert not torch.allclose(layer(flipped, (4, 4))[:, 1:].flip(1), layer(x, (4, 4))[:, 1:], atol=1e-4)
