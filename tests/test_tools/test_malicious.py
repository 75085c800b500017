"""A stranger's checkpoint by every way in: the tools, the converters, init_cfg and the inferencers."""

from __future__ import annotations

import os
import sys
import zipfile
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
from mmgate.tools import image_demo
from mmgate.train import cli

SEGMENTOR = str(ROOT / 'configs/plug/mask2former/plug-mask2former_r18_1xb8-1k_shapes-128x128.py')


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def reduce(path: Path) -> None:
    torch.save(dict(state_dict=dict(weight=Calls(os.system, 'touch code_ran'))), path)


def nested(path: Path) -> None:
    torch.save(dict(state_dict={}, meta=dict(hooks=[dict(deep=(Calls(os.mkdir, 'code_ran'),))])), path)


def module(path: Path) -> None:
    """Ask for a class of a module that does harm when it is imported."""
    Path('evil_module.py').write_text('import os\nos.mkdir("code_ran")\nclass Config: pass\n')
    torch.save({}, path)
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, 'w') as file:
        for name, data in members.items():
            file.writestr(name, b'\x80\x02cevil_module\nConfig\n)R.' if name.endswith('data.pkl') else data)


def bomb(path: Path) -> None:
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as file:
        file.writestr('archive/data.pkl', b'\0' * (100 << 20))


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
    'image_demo': tool(image_demo.run, 'data/shapes/val', 'config.py', 'EVIL', '--device', 'cpu'),
    'agent_attention': script('agent_attention.py'),
    'backbone': backbone,
    'init_cfg': init_cfg,
    'DetInferencer': detector,
    'MMSegInferencer': segmentor,
    'ImageClassificationInferencer': classifier,
}


LIGHT = ('agent_attention', 'backbone', 'init_cfg')


def case(way: str, attack: Callable[[Path], None]) -> Any:
    """All attacks on what needs no whole model; on the others one, and the rest among the slow tests."""
    marks = [needs_mmpretrain] * way.startswith('Image') + [pytest.mark.slow] * (way not in LIGHT and attack != nested)
    return pytest.param(way, attack, marks=marks, id=f'{way}-{attack.__name__}')


@pytest.mark.parametrize(
    'way, attack', [case(way, attack) for way in WAYS for attack in (nested, reduce, module, bomb)]
)
def test_no_way_in(way: str, attack: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, 'argv', sys.argv)
    write_shapes('data/shapes', num_train=1, num_val=1, size=64)
    Path('config.py').write_text(CONFIG.replace('EPOCHS', '1'))
    attack(tmp_path / 'evil.pth')
    try:
        failed = WAYS[way]('evil.pth') == 2
    except ValueError:  # ConfigError, and what the backbones raise
        failed = True
    assert failed and not Path('code_ran').exists() and not Path('converted.pth').exists()
    assert 'evil_module' not in sys.modules
