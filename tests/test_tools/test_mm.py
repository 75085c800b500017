"""mmdet's and mmseg's own tools and inferencers, and ours where no checkout is at hand."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import mmseg
import pytest
import torch
from conftest import ROOT, run_python
from mmengine.hub import get_config
from mmengine.registry import MODELS, init_default_scope
from shapes import write_shapes

from mmgate.errors import ConfigError
from mmgate.mm import cli
from mmgate.tools import mm

DETECTOR = 'mmgate::plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py'
SEGMENTOR = 'mmgate::plug/mask2former/plug-mask2former_r18_1xb8-1k_shapes-128x128.py'


DRAWS = pytest.mark.skipif(mmseg.__version__ == '1.2.2', reason='mmseg 1.2.2 hands OpenCV an array it does not draw on')


@pytest.mark.parametrize('config', [DETECTOR, pytest.param(SEGMENTOR, marks=DRAWS)], ids=['mmdet', 'mmseg'])
def test_mms_browse_dataset_shows_our_configs(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a foreign folder with the demos' data."""
    monkeypatch.chdir(tmp_path)
    write_shapes('data/shapes', num_train=3, num_val=2, size=64)
    for name in ('argv', 'path'):  # which a script's folder and arguments go into
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    assert cli.main(mm.run, ['browse_dataset', config, '--not-show', '--output-dir', 'shown']) == 0
    assert 'browse_dataset.py' in capsys.readouterr().err.partition('\n')[0]
    assert len(list(Path('shown').rglob('*.*'))) >= 3


@pytest.mark.parametrize(
    'name, arguments, expected',
    [
        ('print_config', [DETECTOR], 'mmdet/.mim/tools/misc/print_config.py'),
        ('print_config', [SEGMENTOR], 'mmseg/.mim/tools/misc/print_config.py'),
        ('tools/misc/print_config.py', [DETECTOR], 'mmdet/.mim/tools/misc/print_config.py'),
        ('mmseg:print_config', [DETECTOR], 'mmseg/.mim/tools/misc/print_config.py'),
        ('mot/browse_dataset', [], 'mmdet/.mim/tools/analysis_tools/mot/browse_dataset.py'),
        ('visualization_cam', [], 'mmseg/.mim/tools/analysis_tools/visualization_cam.py'),
        ('list_attention', [], 'mmgate/.mim/tools/analysis_tools/list_attention.py'),
    ],
)
def test_mms_files_are_found(name: str, arguments: list[str], expected: str) -> None:
    assert str(mm.find(name, arguments)).endswith(f'/{expected}')


@pytest.mark.parametrize(
    'name, message',
    [
        ('print_config', 'write mmdet:print_config or mmseg:print_config'),
        ('print_confg', r'There is no tool print_confg in mmdet, mmseg, mmgate'),
        ('mmpose:print_config', 'There is no tool print_config in mmpose'),
        ('config', 'There is no tool config'),
    ],
)
def test_what_is_not_found_is_one_message(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mm.find(name)


def test_one_host_alone_and_a_checkout_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / 'tools').mkdir()
    (tmp_path / 'tools/train.py').touch()
    (tmp_path / 'tools/__init__.py').touch()
    origins = {'mmdet': tmp_path / 'mmdet/__init__.py', 'mmseg': None, 'mmgate': ROOT / 'mmgate/__init__.py'}
    monkeypatch.setattr(mm, 'find_spec', lambda package: SimpleNamespace(origin=origins[package]))
    assert mm.find('train') == tmp_path / 'tools/train.py'
    mm.run([])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ['mmdet', '  train', 'mmseg', 'mmgate'] and '  analysis_tools/list_attention' in lines


def test_without_mmengine_one_line_says_what_to_type() -> None:
    code = """
import runpy, sys
sys.modules['mmengine'] = None
for name in sys.argv[1:]:
    try:
        runpy.run_path(name, run_name='__main__')
    except SystemExit as error:
        assert error.code == 2
"""
    tools = [ROOT / f'tools/{name}.py' for name in ('train', 'test', 'mm')]
    said = run_python('-c', code, *tools, PYTHONPATH=str(ROOT)).stderr.splitlines()
    assert len(said) == 3
    assert all('need mmengine' in line and 'pip install "mmgate[mm]"' in line for line in said)


@pytest.mark.parametrize('path', [DETECTOR, SEGMENTOR], ids=['DetInferencer', 'MMSegInferencer'])
def test_the_inferencers_take_the_path_of_a_config(tmp_path: Path, path: str) -> None:
    from mmdet.apis import DetInferencer
    from mmseg.apis import MMSegInferencer

    cfg, inferencer = get_config(path), DetInferencer if path == DETECTOR else MMSegInferencer
    init_default_scope(cfg.default_scope)
    weights = MODELS.build(cfg.model).state_dict()
    meta = dict(dataset_meta=dict(cfg.metainfo, palette=[(40 * i, 0, 0) for i in range(6)]))
    torch.save(dict(state_dict=weights, meta=meta), tmp_path / 'weights.pth')
    model = inferencer(cfg.filename, str(tmp_path / 'weights.pth'), device='cpu').model
    assert len(model.dataset_meta['classes']) == 6
    for key, value in weights.items():
        torch.testing.assert_close(model.state_dict()[key], value, equal_nan=True, msg=key)  # some are not drawn
