"""torch's attention, and mmcv's, with keys and values of other widths."""

from __future__ import annotations

import pytest
import torch
from helpers.backbones import trained
from helpers.gated import GATES, gated_copy, learning
from mmcv.cnn.bricks.transformer import MultiheadAttention
from torch import nn


@pytest.mark.parametrize('gate', GATES)
@pytest.mark.parametrize('host', [nn.MultiheadAttention, MultiheadAttention], ids=['torch', 'mmcv'])
def test_attention_over_keys_and_values_of_other_widths_starts_as_the_vanilla_one(
    host: type[nn.Module], gate: str
) -> None:
    model = trained(nn.ModuleDict(dict(attn=host(32, 4, kdim=12, vdim=20))))
    gated, _ = gated_copy(model, dict(GATES[gate], path='attn'))
    inputs = (torch.randn(5, 2, 32), torch.randn(7, 2, 12), torch.randn(7, 2, 20))
    expected, actual = (m['attn'](*inputs) for m in (model, gated))
    if host is nn.MultiheadAttention:
        expected, actual = expected[0], actual[0]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    actual.square().sum().backward()
    assert learning(gated)
