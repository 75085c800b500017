"""DGViT: its layers, and the configs of its data sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, needs_mmpretrain, one_of_each
from mmengine.config import Config

from mmgate.gates import DGSAGate, DifferentialGate
from mmgate.gates.parts.swiglu import SwiGLU
from mmgate.registry import MODELS

FOLDERS = [ROOT / f'configs/{method}/classification' for method in ('dgsa', 'vanilla')]
CONFIGS = {path.name: path for folder in FOLDERS for path in sorted(folder.glob('*vit*_1xb*.py'))}


def build(name: str) -> Any:
    model = MODELS.build(Config.fromfile(CONFIGS[name]).model)
    model.init_weights()
    return model


@needs_mmpretrain
@pytest.mark.parametrize('name', one_of_each(CONFIGS, lambda name: name.partition('_')[0]))
def test_every_config_takes_a_step(name: str) -> None:
    from mmpretrain.structures import DataSample

    model = build(name)
    side = Config.fromfile(CONFIGS[name]).model.backbone.img_size
    losses = model.loss(torch.rand(2, 3, side, side), [DataSample().set_gt_label(1), DataSample().set_gt_label(2)])
    losses['loss'].backward()
    kinds = {type(module) for module in model.backbone.modules()}
    assert (DGSAGate in kinds) == name.startswith('dgvit')
    assert (DifferentialGate in kinds) == name.startswith('diff')
    assert (SwiGLU in kinds) != name.startswith('vit')
    width, patch = (64, 8) if name.endswith('digits.py') else (256, 4)  # the digits' are ours, small
    assert model.backbone.patch_embed.projection.weight.shape == (width, 3, patch, patch)
    assert model.backbone.pos_embed.shape[1] == (side // patch) ** 2 + 1


@needs_mmpretrain
def test_layers_know_their_depth_and_may_be_frozen() -> None:
    model = MODELS.build(dict(type='mmgate.DGViT', num_layers=3, attention=dict(type='DifferentialMultiheadAttention')))
    found = [module.lambda_init for module in model.modules() if isinstance(module, DifferentialGate)]
    assert found == pytest.approx([0.2, 0.8 - 0.6 * np.exp(-0.3), 0.8 - 0.6 * np.exp(-0.6)])
    frozen = MODELS.build(dict(type='mmgate.DGViT', num_layers=3, frozen_stages=2))
    assert [any(p.requires_grad for p in layer.parameters()) for layer in frozen.layers] == [False, False, True]
    vanilla = MODELS.build(dict(type='mmgate.DGViT', num_layers=2, attention=None, drop_path_rate=0.1))
    assert type(vanilla.layers[1].attn).__module__.startswith('mmpretrain')
    assert vanilla.layers[1].ffn.drop_path.drop_prob == pytest.approx(0.1)
    with pytest.raises(ValueError, match="arch='huge' is unknown"):
        MODELS.build(dict(type='mmgate.DGViT', arch='huge'))
