"""torch's attention, and mmcv's: keys and values of other widths, and what is recorded of a call."""

from __future__ import annotations

import pytest
import torch
from conftest import filled
from helpers.backbones import trained
from helpers.gated import GATES, gated_copy, learning
from mmcv.cnn.bricks.transformer import MultiheadAttention
from torch import nn

from mmgate import record


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


@pytest.mark.parametrize('appended', [{}, dict(add_bias_kv=True), dict(add_zero_attn=True)], ids=str)
def test_weights_and_values_that_are_recorded_make_the_output(appended: dict[str, bool]) -> None:
    """Those of the keys that torch appends among them."""
    module = filled(nn.MultiheadAttention(8, 2, batch_first=True, **appended), 0.5)
    given = {name: torch.randn(2, count, 8) for name, count in dict(query=3, key=5, value=5).items()}
    mask = torch.tensor([[False, False, True, False, False]] * 3)
    with record(module) as recording:
        recorded = module(**given, attn_mask=mask)
    weights, values = (recording[''][name].last for name in ('attention', 'values'))
    heads = (weights @ values).transpose(1, 2).flatten(2)
    expected = module(**given, attn_mask=mask)
    torch.testing.assert_close(module.out_proj(heads), expected[0])
    torch.testing.assert_close(recorded, expected)
