"""A stranger's checkpoint by every way in: the tools, the converters, init_cfg and the inferencers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, needs_mmpretrain
from mmengine.registry import MODELS, init_default_scope
from shapes import write_shapes
from test_end_to_end import CONFIG

import mmgate  # noqa: F401
from mmgate.backbones import AgentPVT
from mmgate.train import cli

SEGMENTOR = str(ROOT / 'configs/plug/mask2former/plug-mask2former_r18_1xb8-1k_shapes-128x128.py')


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def tool(command: Callable[[list[str]], None], *arguments: str) -> Callable[[str], int]:
    return lambda path: cli.main(command, [path if argument == 'EVIL' else argument for argument in arguments])


def script(name: str) -> Callable[[str], int]:
    """Run a converter as a user does, but for the start of a process."""

    def call(path: str) -> int:
        sys.argv = [name, path, 'converted.pth']
        source = ROOT / 'tools/model_converters' / name
        try:
            exec(compile(source.read_text(), name, 'exec'), dict(__name__='__main__', __file__=str(source)))
        except SystemExit as ended:
            return 2 if isinstance(ended.code, str) else ended.code or 0
        return 0

    return call


def backbone(path: str) -> None:
    sizes = dict(embed_dims=8, num_layers=[1, 1, 1, 1], num_heads=[1, 1, 1, 1], agent_nums=(4, 4, 4, 4))
    AgentPVT(**sizes, init_cfg=dict(type='Pretrained', checkpoint=path)).init_weights()


def init_cfg(path: str) -> None:
    init_default_scope('mmdet')
    backbone = dict(type='ResNet', depth=18, base_channels=4, init_cfg=dict(type='Pretrained', checkpoint=path))
    MODELS.build(backbone).init_weights()


def detector(path: str) -> None:
    from mmdet.apis import DetInferencer

    DetInferencer('config.py', path, device='cpu')


def segmentor(path: str) -> None:
    from mmseg.apis import MMSegInferencer

    MMSegInferencer(SEGMENTOR, weights=path, device='cpu')


def classifier(path: str) -> None:
    from mmpretrain import ImageClassificationInferencer

    ImageClassificationInferencer('resnet18_8xb32_in1k', pretrained=path, device='cpu')


WAYS: dict[str, Callable[[str], Any]] = {
    'test': tool(cli.test, 'config.py', 'EVIL', '--work-dir', 'work'),
    'train': tool(cli.train, 'config.py', '--work-dir', 'work', '--cfg-options', 'load_from=evil.pth'),
    'resume': tool(cli.train, 'config.py', '--work-dir', 'work', '--resume', 'EVIL'),
    'agent_attention': script('agent_attention.py'),
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
    monkeypatch.setattr(sys, 'argv', sys.argv)
    write_shapes('data/shapes', num_train=1, num_val=1, size=64)
    Path('config.py').write_text(CONFIG.replace('EPOCHS', '1'))
    torch.save(dict(state_dict={}, meta=dict(hooks=[dict(deep=(Calls(os.mkdir, 'code_ran'),))])), 'evil.pth')
    try:
        failed = WAYS[way]('evil.pth') == 2
    except ValueError:  # ConfigError, and what the backbones raise
        failed = True
    assert failed and not Path('code_ran').exists() and not Path('converted.pth').exists()
