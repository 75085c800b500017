"""A stranger's checkpoint by every way in: the tools, the converters, init_cfg and the inferencers."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, needs_mmpretrain, tool
from helpers.small_demo import CONFIG
from mmengine.registry import MODELS, init_default_scope
from shapes import write_shapes

import mmgate  # noqa: F401
from mmgate.backbones import AgentPVT
from mmgate.train import cli

SEGMENTOR = str(ROOT / 'configs/plug/mask2former/plug-mask2former_r18_1xb8-1k_shapes-128x128.py')
CONVERTER = tool('agent_attention', 'model_converters')


class Evil:
    """Pickles as a call of a function."""

    def __reduce__(self) -> Any:
        return os.mkdir, ('code_ran',)


def backbone() -> None:
    sizes = dict(embed_dims=8, num_layers=[1, 1, 1, 1], num_heads=[1, 1, 1, 1], agent_nums=(4, 4, 4, 4))
    AgentPVT(**sizes, init_cfg=dict(type='Pretrained', checkpoint='evil.pth')).init_weights()


def init_cfg() -> None:
    init_default_scope('mmdet')
    backbone = dict(type='ResNet', depth=18, base_channels=4, init_cfg=dict(type='Pretrained', checkpoint='evil.pth'))
    MODELS.build(backbone).init_weights()


def detector() -> None:
    from mmdet.apis import DetInferencer

    DetInferencer('config.py', 'evil.pth', device='cpu')


def segmentor() -> None:
    from mmseg.apis import MMSegInferencer

    MMSegInferencer(SEGMENTOR, weights='evil.pth', device='cpu')


def classifier() -> None:
    from mmpretrain import ImageClassificationInferencer

    ImageClassificationInferencer('resnet18_8xb32_in1k', pretrained='evil.pth', device='cpu')


WAYS: dict[str, Callable[[], Any]] = {
    'test': partial(cli.main, cli.test, ['config.py', 'evil.pth']),
    'train': partial(cli.main, cli.train, ['config.py', '--cfg-options', 'load_from=evil.pth']),
    'resume': partial(cli.main, cli.train, ['config.py', '--resume', 'evil.pth']),
    'agent_attention': partial(cli.main, CONVERTER.main, ['evil.pth', 'converted.pth']),
    'backbone': backbone,
    'init_cfg': init_cfg,
    'DetInferencer': detector,
    'MMSegInferencer': segmentor,
    'ImageClassificationInferencer': classifier,
}


@pytest.mark.parametrize('way', [pytest.param(way, marks=[needs_mmpretrain] * way.startswith('Image')) for way in WAYS])
def test_no_way_in(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What loaders refuse, and how, stands in test_checkpoints."""
    monkeypatch.chdir(tmp_path)
    write_shapes('data/shapes', num_train=1, num_val=1, size=64)
    Path('config.py').write_text(CONFIG.replace('EPOCHS', '1'))
    torch.save(dict(state_dict={}, meta=dict(hooks=[dict(deep=(Evil(),))])), 'evil.pth')
    try:
        failed = WAYS[way]() == 2
    except ValueError:  # ConfigError, and what the backbones raise
        failed = True
    assert failed and not Path('code_ran').exists() and not Path('converted.pth').exists()
