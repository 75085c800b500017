"""CSwin's attention in stripes, as a layer and in other hosts."""

from __future__ import annotations

import pytest
import torch
from conftest import filled
from mmdet.models.backbones.pvt import SpatialReductionAttention
from torch import nn

from mmgate import gate_parameters, swap_attention
from mmgate.errors import ConfigError
from mmgate.gate import Sizes
from mmgate.gates import CrossWindowAttention, CrossWindowGate, SoftmaxAttention


def test_cross_windows_go_into_another_host_by_a_rule() -> None:
    """And compute there what the layer computes."""
    model = nn.ModuleDict(dict(attn=SpatialReductionAttention(12, 2, sr_ratio=2)))
    swap_attention(model, dict(path='attn', type='CrossWindowAttention', split=2))
    layer = filled(CrossWindowAttention(12, 2, split=2), 0.5).eval()
    theirs = {'qkv.': 'attn.in_proj_', 'proj.': 'attn.out_proj.', 'lepe.': 'gate.lepe.'}
    state = {}
    for name, tensor in layer.state_dict().items():
        old = next(old for old in theirs if name.startswith(old))
        state[f'attn.{theirs[old]}{name.removeprefix(old)}'] = tensor
    model.eval().load_state_dict(state)
    x = torch.randn(2, 15, 12)
    torch.testing.assert_close(model['attn'](x, (3, 5)), layer(x, (3, 5)))
    assert list(gate_parameters(model)) == [
        f'attn.gate.lepe.{branch}.{part}' for branch in (0, 1) for part in ('weight', 'bias')
    ]
    hosts = nn.ModuleDict(dict(odd=SpatialReductionAttention(12, 3)))
    with pytest.raises(ConfigError, match='num_heads=3 must be even'):
        swap_attention(hosts, dict(path='odd', type='CrossWindowAttention'))


def test_cross_windows_take_no_class_token() -> None:
    with pytest.raises(ConfigError, match='no class token: it would lie in no stripe'):
        CrossWindowGate(Sizes(12, 2, class_tokens=1))


def test_one_window_of_the_whole_map_is_softmax_attention() -> None:
    """By another scale, too, and beside what the convolution adds."""
    layer, plain = CrossWindowAttention(12, 3, split=None, qk_scale=0.9), SoftmaxAttention(12, 3, qk_scale=0.9)
    nn.init.zeros_(layer.lepe[0].weight)
    nn.init.zeros_(layer.lepe[0].bias)
    plain.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(2, 15, 12)
    torch.testing.assert_close(layer(x, (3, 5)), plain(x, (3, 5)))
