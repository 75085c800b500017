"""PVT, Swin and CSwin with agent and SAGA attention beside their vanilla partners."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.published_cswin import SMALL
from helpers.starts import assert_uniform

import mmgate
from mmgate.adapter import unused_names
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


@pytest.mark.parametrize('kind', ['mmgate.PVT', 'mmgate.AgentPVT', 'mmgate.SAGAPVT'])
def test_the_paper_start_of_pvt_is_one_of_narrow_linear_layers(kind: str) -> None:
    """The vanilla partner's as well: under one seed what they share is equal in both starts."""
    starts = []
    for name in (kind, 'mmgate.PVT'):
        torch.manual_seed(0)
        model = MODELS.build(dict(type=name, init='paper', **TINY))
        model.init_weights()
        starts.append([parameter for key, parameter in model.named_parameters() if '.ffn.layers.0.weight' in key])
        joint = [p for n, p in model.named_parameters() if n.endswith(('in_proj_weight', '.qkv.weight'))]
        for weight in (*starts[-1], *joint):
            torch.testing.assert_close(weight.std().item(), 0.02, rtol=0.05, atol=0)
    assert all(torch.equal(one, other) for one, other in zip(*starts, strict=True))


@pytest.mark.parametrize('size', [(64, 64), (33, 90)], ids=str)
def test_cswin_takes_any_size_and_more_agents(size: tuple[int, int]) -> None:
    model = MODELS.build(dict(type='mmgate.AgentCSwin', agent_nums=(25, 36, 16, None), drop_path_rate=0.2, **SMALL))
    assert [stage[0].attn.gate.pretrain_grid ** 2 for stage in model.stages[:3]] == [9, 16, 16]  # of the third in use
    model.init_weights()
    maps = model(torch.randn(2, 3, *size))
    assert [m.shape[1] for m in maps] == [16, 32, 64, 128]
    sum(m.sum() for m in maps).backward()
    assert {n for n, p in model.named_parameters() if p.grad is None} == {*unused_names(model)}


def test_drop_path_of_cswin_rises_over_the_blocks_and_is_off_by_default() -> None:
    def rates(**options: float) -> list[float]:
        model = MODELS.build(dict(type='mmgate.AgentCSwin', **SMALL, **options))
        return [getattr(block.drop_path, 'drop_prob', 0.0) for stage in model.stages for block in stage]

    found = rates(drop_path_rate=0.3)
    assert found == [pytest.approx(0.3 * number / (len(found) - 1)) for number in range(len(found))]
    assert not any(rates())
