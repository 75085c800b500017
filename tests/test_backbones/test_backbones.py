"""PVT and Swin with agent and SAGA attention beside their vanilla partners and their hosts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.published_cswin import SMALL
from helpers.starts import assert_uniform
from mmengine.registry import init_default_scope
from torch import nn

import mmgate
from mmgate.registry import MODELS

TINY = dict(num_layers=(1, 1, 1, 1), drop_path_rate=0.0)
TINY_SWIN = dict(depths=(2, 2, 2, 2), drop_path_rate=0.0)


@torch.no_grad()
@pytest.mark.parametrize(
    'kind, partner, options',
    [
        ('AgentPVT', dict(type='mmgate.PVT'), TINY),
        ('SAGAPVTv2', dict(type='mmgate.PVTv2'), TINY),
        ('AgentSwin', dict(type='mmgate.Swin'), TINY_SWIN),
        ('SAGASwin', dict(type='mmgate.Swin'), dict(pad_small_map=False, **TINY_SWIN)),
        ('AgentCSwin', dict(type='mmgate.AgentCSwin', agent_nums=(None,) * 4), SMALL),
    ],
    ids=str,
)
def test_a_backbone_without_its_gates_is_its_vanilla_partner(
    kind: str, partner: dict[str, Any], options: dict[str, Any]
) -> None:
    """It starts with the same numbers, and computes the same once the gates are off: maps smaller than windows, too."""
    models = []
    for cfg in (dict(type=f'mmgate.{kind}'), partner):
        torch.manual_seed(0)
        model = MODELS.build({**cfg, **options})
        model.init_weights()
        models.append(model.eval())
    gated, vanilla = models
    assert any('.gate.' in key for key in gated.state_dict())
    mmgate.restore_attention(gated)
    assert list(gated.state_dict()) == list(vanilla.state_dict())
    assert all(torch.equal(value, vanilla.state_dict()[key]) for key, value in gated.state_dict().items())
    x = torch.randn(1, 3, 32, 64)
    assert all(torch.equal(actual, expected) for actual, expected in zip(gated(x), vanilla(x), strict=True))


SMALL_PVT = dict(
    embed_dims=32, num_layers=[1, 1, 2, 1], num_heads=[1, 2, 4, 8], mlp_ratios=[4, 4, 4, 4], pretrain_img_size=128
)
SMALL_SWIN = dict(embed_dims=32, depths=(2, 2, 2, 1), num_heads=(1, 2, 4, 8), pretrain_img_size=128)


@torch.no_grad()
@pytest.mark.parametrize('kind', ['AgentPVT', 'SAGAPVT', 'AgentSwin', 'SAGASwin'])
def test_backbones_see_padding_about_as_the_hosts_do(kind: str) -> None:
    """No backbone is told where the padding is; its features change at most twice as the host's do."""
    if 'PVT' in kind:
        vanilla, ours = dict(type='PyramidVisionTransformer', **SMALL_PVT), dict(type=f'mmgate.{kind}', **SMALL_PVT)
    else:
        vanilla = dict(type='SwinTransformer', **SMALL_SWIN)
        ours = dict(SMALL_SWIN, type=f'mmgate.{kind}', blocks=(2, 2, 2, 0))
    init_default_scope('mmdet')
    image = torch.randn(1, 3, 96, 96)
    padded = nn.functional.pad(image, (0, 32, 0, 32))
    changes = []
    for cfg in (vanilla, ours):
        torch.manual_seed(0)
        model: Any = MODELS.build(dict(cfg))
        model.init_weights()
        model.eval()
        alone, together = model(image), model(padded)
        changes.append(
            max(
                float((y[..., : x.shape[2], : x.shape[3]] - x).norm() / (x - x.mean((2, 3), keepdim=True)).norm())
                for x, y in zip(alone, together, strict=True)
            )
        )
    assert changes[1] <= 2 * changes[0], f'{changes[1]:.3f}, the host {changes[0]:.3f}'


@pytest.mark.parametrize('kind', ['AgentPVT', 'SAGAPVT', 'SAGAPVTv2', 'AgentSwin', 'SAGASwin'])
def test_backbones_keep_their_starts(kind: str) -> None:
    """mmdet's PVT would make 0.279 of the 5 x 5 convolution's deviation of 0.116."""
    sizes = TINY if 'PVT' in kind else dict(depths=(1, 1, 1, 1), blocks=(1, 1, 1, 0), drop_path_rate=0.0)
    model = MODELS.build(dict(type=f'mmgate.{kind}', **sizes))
    model.init_weights()
    for name, module in model.named_modules():
        if name.endswith('dwc'):
            assert_uniform(module.weight, 1 / module.kernel_size[0])
        for bias in ('an_bias', 'na_bias', 'ah_bias', 'ha_bias') if hasattr(module, 'an_bias') else ():
            assert 0.015 < getattr(module, bias).std() < 0.025
        for gate in (module.gate_k, module.gate_v, module.gate_out) if hasattr(module, 'gate_k') else ():
            assert 0.015 < gate.weight.std() < 0.025 and torch.count_nonzero(gate.bias) == 0
        assert not torch.count_nonzero(getattr(module, 'position_encoding', torch.zeros(1)))
