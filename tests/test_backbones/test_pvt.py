"""PVT and Swin with any attention by its type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.families import MAP
from torch import nn

from mmgate.gates.base.map import MapGate
from mmgate.registry import MODELS

TYPES = sorted({kind.__name__ for kind, _ in MAP.values()} - {'CrossWindowAttention'})
TINY: dict[str, dict[str, Any]] = {
    'LinearPVT': dict(num_layers=(1, 1, 1, 1), drop_path_rate=0.0),
    'LinearPVTv2': dict(num_layers=(1, 1, 1, 1), drop_path_rate=0.0),
    'LinearSwin': dict(depths=(2, 2, 2, 2), drop_path_rate=0.0),
}


def build(kind: str, attention: Any, **overrides: Any) -> nn.Module:
    return MODELS.build(dict(type=f'mmgate.{kind}', attention=attention, **{**TINY[kind], **overrides}))


@torch.no_grad()
@pytest.mark.parametrize('attention', TYPES)
@pytest.mark.parametrize('kind', TINY)
def test_a_backbone_takes_any_attention_in_any_size(kind: str, attention: str) -> None:
    model = build(kind, dict(type=attention))
    model.init_weights()
    assert sum(type(m) is MODELS.get(attention).gate_type for m in model.modules()) == 4
    for size in ((32, 32), (33, 70)):
        maps = model.eval()(torch.randn(1, 3, *size))
        assert len(maps) == 4 and all(m.isfinite().all() for m in maps)
        assert maps[3].shape[2] == 1 or size != (32, 32)


def test_a_backbone_takes_an_attention_for_each_stage() -> None:
    kinds = ['HydraAttention', 'EfficientAttention', 'AgentAttention', 'SAGAAttention']
    model = build('LinearPVT', [dict(type=kind) for kind in kinds])
    gates = [type(m) for m in model.modules() if isinstance(m, MapGate)]
    assert gates == [MODELS.get(kind).gate_type for kind in kinds]


@pytest.mark.parametrize('kind', ['mmgate.LinearPVT', 'mmgate.AgentPVT', 'mmgate.SAGAPVT'])
def test_the_paper_start_of_pvt_is_one_of_narrow_linear_layers(kind: str) -> None:
    """The vanilla partner's as well: under one seed what they share is equal in both starts."""
    starts = []
    for name in (kind, 'mmgate.LinearPVT'):
        torch.manual_seed(0)
        model = MODELS.build(dict(type=name, init='paper', **TINY['LinearPVT']))
        model.init_weights()
        starts.append([parameter for key, parameter in model.named_parameters() if '.ffn.layers.0.weight' in key])
        joint = [p for n, p in model.named_parameters() if n.endswith(('in_proj_weight', '.qkv.weight'))]
        for weight in (*starts[-1], *joint):
            torch.testing.assert_close(weight.std().item(), 0.02, rtol=0.05, atol=0)
    assert all(torch.equal(one, other) for one, other in zip(*starts, strict=True))
