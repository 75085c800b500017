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
from conftest import ROOT, needs_mmpretrain, tool
from helpers.small_demo import write_demo
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner.checkpoint import CheckpointLoader, load_from_http, load_from_local

import mmgate  # noqa: F401
from mmgate.backbones import AgentPVT
from mmgate.checkpoints.loading import guarded_loaders, load_checkpoint_file
from mmgate.errors import ConfigError
from mmgate.mm import cli

SEGMENTOR = str(ROOT / 'configs/plug/mask2former/plug-mask2former_r18_1xb8-1k_shapes-128x128.py')


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


def init_cfg() -> None:
    init_default_scope('mmdet')
    backbone = dict(type='ResNet', depth=18, base_channels=4, init_cfg=dict(type='Pretrained', checkpoint='evil.pth'))
    MODELS.build(backbone).init_weights()


def detector() -> None:
    from mmdet.apis import DetInferencer

    DetInferencer('gated.py', 'evil.pth', device='cpu')


def segmentor() -> None:
    from mmseg.apis import MMSegInferencer

    MMSegInferencer(SEGMENTOR, weights='evil.pth', device='cpu')


def classifier() -> None:
    from mmpretrain import ImageClassificationInferencer

    ImageClassificationInferencer('resnet18_8xb32_in1k', pretrained='evil.pth', device='cpu')


def script(program: str, *arguments: str) -> None:
    """Run a script, and raise an error of the user's with which it ends."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr('sys.argv', [program, *arguments])
        patch.syspath_prepend(str((ROOT / program).parent))
        runpy.run_path(str(ROOT / program), run_name='__main__')
    assert end.value.code == 2
    raise ConfigError


WAYS: dict[str, Callable[[], Any]] = {
    'train.py --resume': partial(script, 'tools/train.py', 'gated.py', '--resume', 'evil.pth'),
    'load_from': partial(cli.train, ['gated.py', '--cfg-options', 'load_from=evil.pth']),
    'test.py': partial(script, 'tools/test.py', 'gated.py', 'evil.pth'),
    "mmdet's test.py": partial(script, 'tools/mm.py', 'mmdet:test', 'gated.py', 'evil.pth'),
    'gates': partial(script, 'tools/model_converters/gates.py', 'extract', 'gated.py', 'evil.pth', 'converted.pth'),
    'agent_attention': partial(tool('agent_attention', 'model_converters').main, ['evil.pth', 'converted.pth']),
    'figure': partial(script, 'tools/analysis_tools/plot_gates.py', 'gated.py', 'evil.pth', '--out', 'figures'),
    'backbone': backbone,
    'init_cfg': guarded_loaders()(init_cfg),
    'DetInferencer': guarded_loaders()(detector),
    'MMSegInferencer': guarded_loaders()(segmentor),
    'ImageClassificationInferencer': guarded_loaders()(classifier),
}


@pytest.mark.parametrize('way', [pytest.param(way, marks=[needs_mmpretrain] * way.startswith('Image')) for way in WAYS])
def test_no_way_in(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tests of mmgate.checkpoints have what loaders refuse, and with which message."""
    monkeypatch.chdir(tmp_path)
    write_demo(tmp_path, images=1)
    torch.save(dict(state_dict={}, meta=dict(hooks=[dict(deep=(Evil(),))])), 'evil.pth')
    with pytest.raises(ValueError) as error:  # ConfigError, and what the backbones raise
        WAYS[way]()
    said = str(error.value) + capsys.readouterr().err
    # What reads a published file reads its tensors alone, and finds none.
    assert 'evil.pth asks for posix.mkdir' in said or 'The checkpoint holds no tensors' in said
    assert not Path('code_ran').exists() and not Path('converted.pth').exists()
    assert loaders() == THEIRS


def test_mmengines_loaders_are_back_after_a_guarded_block() -> None:
    """Also after an error, and after a block in a block."""
    assert loaders() == THEIRS
    with pytest.raises(ZeroDivisionError), guarded_loaders():
        with guarded_loaders():
            pass
        assert loaders()[0] is load_checkpoint_file
        raise ZeroDivisionError
    assert loaders() == THEIRS
