"""PVT, PVTv2 and Swin with any of the linear attentions: sizes as in the papers, any image, the vanilla start."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip('mmdet', reason='the backbones are built on mmdet, which is not installed')

import mmgate
from mmgate import MODELS, MapGate
from projects import linear_attention as project

KINDS = [name for name in project.__all__ if name.endswith('Attention')]
SMALL: dict[str, dict[str, Any]] = {
    'LinearPVT': dict(num_layers=(1, 1, 1, 1), drop_path_rate=0.0),
    'LinearPVTv2': dict(num_layers=(1, 1, 1, 1), drop_path_rate=0.0),
    'LinearSwin': dict(depths=(2, 2, 2, 2), drop_path_rate=0.0),
}
# Each attention in each backbone once, and each backbone with each attention's position encoding.
PAIRS = [(host, kind) for number, kind in enumerate(KINDS) for host in (list(SMALL)[number % 3], 'LinearSwin')]


def build(host: str, attention: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = MODELS.build(dict(type=f'mmgate.{host}', attention=attention, **{**SMALL[host], **options}))
    model.init_weights()
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize('host, kind', sorted({*PAIRS}), ids=str)
def test_a_backbone_takes_it_for_images_of_any_size_and_starts_as_vanilla(host: str, kind: str) -> None:
    model, vanilla = build(host, dict(type=kind)), build(host, None)
    gates = [module for module in model.modules() if isinstance(module, MapGate)]
    assert [type(gate) for gate in gates] == [getattr(project, kind).gate_type] * 4
    for size in ((32, 32), (33, 70)):
        maps = model(torch.randn(1, 3, *size))
        assert len(maps) == 4 and all(one.isfinite().all() for one in maps)
    mmgate.restore_attention(model)
    assert all(torch.equal(value, vanilla.state_dict()[key]) for key, value in model.state_dict().items())


def test_each_stage_may_have_another() -> None:
    kinds = ['HydraAttention', 'EfficientAttention', 'AgentAttention', 'SAGAAttention']
    gates = [m for m in build('LinearPVT', [dict(type=kind) for kind in kinds]).modules() if isinstance(m, MapGate)]
    assert [type(gate) for gate in gates] == [MODELS.get(kind).gate_type for kind in kinds]
    with pytest.raises(mmgate.ConfigError, match=r'Did you mean\n  HydraAttention'):
        build('LinearPVT', dict(type='HydroAttention'))


@pytest.mark.parametrize(
    'kind, arch, channels, millions',
    [
        ('HydraAttention', 'tiny', 768, 28.3),
        ('EfficientAttention', 'tiny', 768, 28.3),
        ('LinearAngularAttention', 'tiny', 768, 28.3),
        ('FocusedLinearAttention', 'tiny', 768, 29),
        ('PolaFormerAttention', 'tiny', 768, 29),
        ('PolaFormerAttention', 'small', 768, 51),
        ('PolaFormerAttention', 'base', 1024, 89),
    ],
)
def test_swin_has_as_many_parameters_as_in_the_papers(kind: str, arch: str, channels: int, millions: float) -> None:
    """With a classifier of 1000 classes, and linear attention in the blocks of stages 1 and 2."""
    model = project.LinearSwin(arch, attention=dict(type=kind), out_indices=(3,))
    gated = [[hasattr(block.attn, 'gate') for block in stage.blocks] for stage in model.stages]
    assert [sum(stage) for stage in gated] == [2, 2, 0, 0]
    count = sum(p.numel() for p in model.parameters() if p.requires_grad) + (channels + 1) * 1000
    assert round(count / 1e6, len(str(millions).partition('.')[2])) == millions
