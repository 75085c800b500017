"""PVT and Swin with any attention by its type, and PVT's two starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mmgate.gates.base.map import MapGate
from mmgate.registry import MODELS

TINY: dict[str, dict[str, Any]] = {
    'PVT': dict(num_layers=(1, 1, 1, 1), drop_path_rate=0.0),
    'PVTv2': dict(num_layers=(1, 1, 1, 1), drop_path_rate=0.0),
    'Swin': dict(depths=(1, 1, 1, 1), drop_path_rate=0.0),
}


def build(kind: str, attention: Any) -> nn.Module:
    return MODELS.build(dict(type=f'mmgate.{kind}', attention=attention, **TINY[kind]))


@torch.no_grad()
@pytest.mark.parametrize('kind', TINY)
def test_a_backbone_takes_an_attention_for_each_stage_in_any_size(kind: str) -> None:
    kinds = ['AgentAttention', 'SAGAAttention', 'SoftmaxAttention', 'SAGAAttention']
    model = build(kind, [dict(type=kind) for kind in kinds])
    model.init_weights()
    gates = [type(m) for m in model.modules() if isinstance(m, MapGate)]
    assert gates == [MODELS.get(kind).gate_type for kind in kinds]
    for size in ((32, 32), (33, 70)):
        maps = model.eval()(torch.randn(1, 3, *size))
        assert len(maps) == 4 and all(m.isfinite().all() for m in maps)
        assert maps[3].shape[2] == 1 or size != (32, 32)


@pytest.mark.parametrize('kind', ['mmgate.PVT', 'mmgate.AgentPVT', 'mmgate.SAGAPVT'])
def test_the_paper_start_of_pvt_is_one_of_narrow_linear_layers(kind: str) -> None:
    """The vanilla partner's as well: under one seed what they share is equal in both starts."""
    starts = []
    for name in (kind, 'mmgate.PVT'):
        torch.manual_seed(0)
        model = MODELS.build(dict(type=name, init='paper', **TINY['PVT']))
        model.init_weights()
        starts.append([parameter for key, parameter in model.named_parameters() if '.ffn.layers.0.weight' in key])
        joint = [p for n, p in model.named_parameters() if n.endswith(('in_proj_weight', '.qkv.weight'))]
        for weight in (*starts[-1], *joint):
            torch.testing.assert_close(weight.std().item(), 0.02, rtol=0.05, atol=0)
    assert all(torch.equal(one, other) for one, other in zip(*starts, strict=True))
