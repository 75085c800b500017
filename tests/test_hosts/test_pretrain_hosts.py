"""mmpretrain's attentions as hosts: Swin in both versions, and SAM's image encoder."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import needs_mmpretrain
from mmengine.registry import MODELS
from test_adapters import BACKBONES, GATES, gated_copy, trained
from torch import nn

from mmgate import swap_attention

pytestmark = needs_mmpretrain
PRETRAIN = {name: BACKBONES[name] for name in ('swin_of_mmpretrain', 'swin_v2', 'sam')}


@pytest.mark.parametrize('gate', ['plug', 'sdpa_G1'])
@pytest.mark.parametrize('name', PRETRAIN)
def test_mixed_precision(name: str, gate: str) -> None:
    cfg, _, path, _ = BACKBONES[name]
    model = trained(MODELS.build(copy.deepcopy(cfg)))
    gated, _ = gated_copy(model, dict(GATES[gate], path=path))
    x = torch.randn(1, 3, 96, 128)
    with torch.autocast('cpu', torch.bfloat16):
        expected, actual = model(x), gated(x)
        sum(map_.float().square().mean() for map_ in actual).backward()
    for theirs, ours in zip(expected, actual, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.1, atol=0.1 * theirs.abs().max().item())


def test_the_temperature_of_cosines_is_bounded() -> None:
    cfg, _, path, _ = BACKBONES['swin_v2']
    model = trained(MODELS.build(copy.deepcopy(cfg)))
    for block in model.stages[0].blocks:
        nn.init.constant_(block.attn.w_msa.logit_scale, 9.0)
    gated, _ = gated_copy(model, dict(GATES['plug'], path=path))
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(gated(x)[0], model(x)[0], rtol=1e-4, atol=1e-4)


def test_attention_over_the_whole_map_fits_the_first_version_only() -> None:
    rule = dict(type='AgentAttention', agent_num=4, map_size=(8, 8), path='stages.*.blocks.0.attn')
    first, second = (MODELS.build(copy.deepcopy(BACKBONES[name][0])) for name in ('swin_of_mmpretrain', 'swin_v2'))
    assert len(swap_attention(first, rule)) == 4
    assert all(map_.isfinite().all() for map_ in first(torch.randn(1, 3, 64, 64)))
    with pytest.raises(ValueError, match='around a WindowMSAV2: it would lose'):
        swap_attention(second, rule)
