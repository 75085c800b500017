"""A stranger's checkpoint by every way in: tools, converters, backbones, and mmengine's own in a guarded block."""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, needs_mmpretrain, run_python, tool
from helpers.small_demo import CONFIG
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner.checkpoint import CheckpointLoader, load_from_http, load_from_local
from shapes import write_shapes

import mmgate  # noqa: F401
from mmgate.analysis.loading import load_model
from mmgate.backbones import AgentPVT
from mmgate.checkpoints.loading import guarded_loaders, load_checkpoint_file
from mmgate.mm import cli

SEGMENTOR = str(ROOT / 'configs/plug/mask2former/plug-mask2former_r18_1xb8-1k_shapes-128x128.py')
CONVERTER = tool('agent_attention', 'model_converters')


class Evil:
    """Pickles as a call of a function."""

    def __reduce__(self) -> Any:
        return os.mkdir, ('code_ran',)


def loaders() -> list[Callable]:
    """Return mmengine's loaders of files and web addresses."""
    paths = ('a.pth', 'http://a/a.pth', 'https://a/a.pth')
    return [CheckpointLoader._get_checkpoint_loader(path) for path in paths]


THEIRS = [load_from_local, load_from_http, load_from_http]


def backbone() -> None:
    sizes = dict(embed_dims=8, num_layers=[1, 1, 1, 1], num_heads=[1, 1, 1, 1], agent_nums=(4, 4, 4, 4))
    AgentPVT(**sizes, init_cfg=dict(type='Pretrained', checkpoint='evil.pth')).init_weights()


def analysis() -> None:
    load_model(Config.fromfile('config.py'), 'evil.pth')


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
    'load_model': analysis,
    'backbone': backbone,
    'init_cfg': guarded_loaders()(init_cfg),
    'DetInferencer': guarded_loaders()(detector),
    'MMSegInferencer': guarded_loaders()(segmentor),
    'ImageClassificationInferencer': guarded_loaders()(classifier),
}
# Scripts and a module, with their arguments around the checkpoint.
SCRIPTS = {
    'train': ('tools/train.py', 'config.py', '--resume', 'evil.pth'),
    'test': ('tools/test.py', 'config.py', 'evil.pth'),
    'module': ('mmgate.tools.test', 'config.py', 'evil.pth'),
    'gates': ('tools/model_converters/gates.py', 'extract', 'config.py', 'evil.pth', 'gates.safetensors'),
    'figure': ('tools/analysis_tools/plot_gates.py', 'config.py', 'evil.pth', '--out', 'figures'),
    "mmdet's": ('tools/mm.py', 'mmdet:test', 'config.py', 'evil.pth'),
}
REFUSED = 'checkpoint evil.pth asks for posix.mkdir'


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with data, a config and the checkpoint."""
    monkeypatch.chdir(tmp_path)
    write_shapes('data/shapes', num_train=1, num_val=1, size=64)
    Path('config.py').write_text(CONFIG.replace('EPOCHS', '1'))
    torch.save(dict(state_dict={}, meta=dict(hooks=[dict(deep=(Evil(),))])), 'evil.pth')


@pytest.mark.parametrize('way', [pytest.param(way, marks=[needs_mmpretrain] * way.startswith('Image')) for way in WAYS])
@pytest.mark.usefixtures('evil')
def test_no_way_in(way: str) -> None:
    """The tests of mmgate.checkpoints have what loaders refuse, and with which message."""
    try:
        failed = WAYS[way]() == 2
    except ValueError:  # ConfigError, and what the backbones raise
        failed = True
    assert failed and not Path('code_ran').exists() and not Path('converted.pth').exists()
    assert loaders() == THEIRS


@pytest.mark.parametrize('script', SCRIPTS)
@pytest.mark.usefixtures('evil')
def test_no_way_in_by_a_script(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *arguments = SCRIPTS[script]
    monkeypatch.setattr('sys.argv', [program, *arguments])
    with pytest.raises(SystemExit) as end:
        if program.endswith('.py'):
            monkeypatch.syspath_prepend(str((ROOT / program).parent))
            runpy.run_path(str(ROOT / program), run_name='__main__')
        else:
            runpy.run_module(program, run_name='__main__')
    said = capsys.readouterr().err
    assert REFUSED in said and 'it was not loaded' in said
    assert end.value.code == 2 and not Path('code_ran').exists()


@pytest.mark.slow  # a process for what is one above
@pytest.mark.usefixtures('evil')
def test_no_way_in_by_a_script_in_a_process_of_its_own() -> None:
    program, *arguments = SCRIPTS["mmdet's"]
    run = run_python(ROOT / program, *arguments, fails=True, PYTHONPATH=str(ROOT))
    assert run.returncode == 2 and REFUSED in run.stderr and not Path('code_ran').exists()


def test_mmengines_loaders_are_back_after_a_guarded_block() -> None:
    """Also after an error, and after a block in a block."""
    assert loaders() == THEIRS
    with pytest.raises(ZeroDivisionError), guarded_loaders():
        with guarded_loaders():
            pass
        assert loaders()[0] is load_checkpoint_file
        raise ZeroDivisionError
    assert loaders() == THEIRS
