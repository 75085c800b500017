"""LV-ViT and ViTAE with PLuG, from their configs: they start as the vanilla ones and learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip('mmpretrain', reason='the classifiers are built on mmpretrain, which is not installed')

from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmpretrain.structures import DataSample

CONFIGS = Path(__file__).parents[1] / 'configs'
SMALL: dict[str, dict[str, Any]] = {
    'lvvit-t_8xb128-300e_in1k': dict(num_layers=2, img_size=64, drop_path_rate=0.0),
    'vitae-t_4xb128-300e_in1k': dict(depths=(0, 0, 2), drop_path_rate=0.0),
}


@pytest.mark.parametrize('name', SMALL)
def test_gated_config_takes_a_step_from_the_vanilla_start(name: str) -> None:
    """Shared parameters are equal, logits are to rounding; then every parameter gets a gradient."""
    init_default_scope('mmpretrain')
    models = []
    for path in (f'vanilla/{name}.py', f'plug-{name}.py'):
        cfg = Config.fromfile(CONFIGS / path).model
        cfg.backbone.update(SMALL[name])
        torch.manual_seed(0)
        models.append(MODELS.build(cfg))
        models[-1].init_weights()
        models[-1].eval()
    vanilla, gated = models
    shared = dict(vanilla.named_parameters())
    gates = {key for key, _ in gated.named_parameters()} - set(shared)
    assert {key.split('.attn.gate.')[0][-1] for key in gates} == ({'0', '1'} if 'lvvit' in name else {'1', '2'})
    assert all(torch.equal(value, shared[key]) for key, value in gated.named_parameters() if key in shared)
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(gated(x), vanilla(x), rtol=1e-4, atol=1e-5)
    losses = gated.train().loss(x, [DataSample().set_gt_label(1), DataSample().set_gt_label(2)])
    sum(losses.values()).backward()
    assert [key for key, parameter in gated.named_parameters() if parameter.grad is None] == []
