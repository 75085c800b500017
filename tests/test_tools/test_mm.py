"""The launcher of mmdet's and mmseg's own tools."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mmseg
import pytest
import torch
from conftest import ROOT
from mmengine.fileio import dump
from mmengine.logging import HistoryBuffer
from shapes import write_shapes

from mmgate.errors import ConfigError
from mmgate.tools import mm

DETECTOR = 'mmgate::plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py'
SEGMENTOR = 'mmgate::plug/mask2former/plug-mask2former_r18_1xb8-1k_shapes-128x128.py'


@pytest.fixture(scope='module')
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A foreign folder with the demos' data."""
    folder = tmp_path_factory.mktemp('project')
    write_shapes(folder / 'data/shapes', num_train=3, num_val=2, size=64)
    return folder


def run(project: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, '-W', 'ignore', str(ROOT / 'tools/mm.py'), *arguments]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=240)


def test_print_config(project: Path) -> None:
    result = run(project, 'print_config', DETECTOR, '--cfg-options', 'model.num_queries=7')
    assert result.returncode == 0, result.stderr[-2000:]
    assert "type='mmgate.Gated'" in result.stdout and 'num_queries=7' in result.stdout
    assert result.stderr.startswith('mmdet:misc/print_config (')


DRAWS = pytest.mark.skipif(mmseg.__version__ == '1.2.2', reason='mmseg 1.2.2 hands OpenCV an array it does not draw on')


@pytest.mark.parametrize('config', [DETECTOR, pytest.param(SEGMENTOR, marks=DRAWS)], ids=['mmdet', 'mmseg'])
def test_browse_dataset(project: Path, tmp_path: Path, config: str) -> None:
    result = run(project, 'browse_dataset', config, '--not-show', '--output-dir', str(tmp_path))
    assert result.returncode == 0, result.stderr[-2000:]
    assert len(list(tmp_path.rglob('*.*'))) >= 3


def test_confusion_matrix(project: Path, tmp_path: Path) -> None:
    instances = dict(labels=torch.zeros(1).long(), scores=torch.ones(1), bboxes=torch.tensor([[0.0, 0.0, 9.0, 9.0]]))
    dump([dict(pred_instances=instances)] * 2, tmp_path / 'predictions.pkl')
    arguments = [DETECTOR, str(tmp_path / 'predictions.pkl'), str(tmp_path)]
    result = run(project, 'analysis_tools/confusion_matrix.py', *arguments)
    assert result.returncode == 0, result.stderr[-2000:]
    assert (tmp_path / 'confusion_matrix.png').stat().st_size > 0


def test_publish_model(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mmdet's tool leaves weights and meta; from torch 2.6 on it has to be told to load what mmengine writes."""
    monkeypatch.setenv('TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD', '1')
    weights = dict(weight=torch.ones(1))
    hub = dict(log_scalars=dict(loss=HistoryBuffer([1.0], [1])))
    torch.save(dict(meta=dict(epoch=1), state_dict=weights, optimizer={}, message_hub=hub), tmp_path / 'a.pth')
    result = run(project, 'mmdet:publish_model', str(tmp_path / 'a.pth'), str(tmp_path / 'out.pth'))
    assert result.returncode == 0, result.stderr[-2000:]
    (published,) = tmp_path.glob('out-*.pth')
    assert torch.load(published) == dict(meta=dict(epoch=1), state_dict=weights)


@pytest.mark.parametrize(
    'name, arguments, expected',
    [
        ('print_config', [DETECTOR], 'mmdet:misc/print_config'),
        ('print_config', [SEGMENTOR], 'mmseg:misc/print_config'),
        ('misc/print_config.py', [SEGMENTOR], 'mmseg:misc/print_config'),
        ('tools/misc/print_config.py', [DETECTOR], 'mmdet:misc/print_config'),
        ('mmseg:print_config', [DETECTOR], 'mmseg:misc/print_config'),
        ('mmdet:browse_dataset', [], 'mmdet:analysis_tools/browse_dataset'),
        ('mot/browse_dataset', [], 'mmdet:analysis_tools/mot/browse_dataset'),
        ('coco_error_analysis', [], 'mmdet:analysis_tools/coco_error_analysis'),
        ('visualization_cam', [], 'mmseg:analysis_tools/visualization_cam'),
        ('mmgate:train', [], 'mmgate:train'),
        ('list_attention', [], 'mmgate:analysis_tools/list_attention'),
    ],
)
def test_finds(name: str, arguments: list[str], expected: str) -> None:
    assert str(mm.find(name, arguments)) == expected


@pytest.mark.parametrize(
    'name, message',
    [
        ('print_config', 'say mmdet:misc/print_config or mmseg:misc/print_config'),
        ('print_confg', r'There is no tool print_confg\. Did you mean misc/print_config\?'),
        ('mmpose:print_config', 'mmpose:print_config: tools are looked for in mmdet, mmseg, mmgate, not in mmpose'),
        ('config', 'There is no tool config'),
    ],
    ids=['both', 'misspelt', 'unknown package', 'part of a name'],
)
def test_refuses(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mm.find(name)


def test_one_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = mm.package_folder
    monkeypatch.setattr(mm, 'package_folder', lambda package: None if package == 'mmseg' else folder(package))
    assert str(mm.find('print_config')) == 'mmdet:misc/print_config'
    assert 'mmseg\n  mmseg is not installed.' in mm.listing()
    with pytest.raises(ConfigError, match=r'^mmseg is not installed\.$'):
        mm.find('mmseg:print_config')


def test_a_checkout_of_a_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mm, 'package_folder', lambda package: tmp_path / package)
    with pytest.raises(ConfigError, match=r'mmdet came without its tools: neither .*mmdet/\.mim/tools nor'):
        mm.find('mmdet:train')
    (tmp_path / 'tools').mkdir()
    (tmp_path / 'tools/train.py').write_text('')
    assert mm.find('mmdet:train').path == tmp_path / 'tools/train.py'


def test_lists_what_there_is(project: Path) -> None:
    result = run(project)
    assert result.returncode == 0, result.stderr[-2000:]
    lines = result.stdout.splitlines()
    assert [line.split(' ')[0] for line in lines if not line.startswith(' ')] == ['mmdet', 'mmseg', 'mmgate']
    assert any(line.split() == ['misc/print_config', 'Print', 'the', 'whole', 'config'] for line in lines)
    assert any(line.split()[:3] == ['analysis_tools/list_attention', 'Print', 'every'] for line in lines)


def test_a_tool_that_needs_what_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / 'needy.py').write_text('import no_such_module')
    monkeypatch.setattr(mm, 'find', lambda *_: mm.Tool('mmdet', 'needy', tmp_path / 'needy.py'))
    monkeypatch.setattr(sys, 'argv', ['mm.py', 'needy'])
    monkeypatch.setattr(sys, 'path', [*sys.path])
    assert mm.main() == 2
    assert "error: mmdet:needy: No module named 'no_such_module'" in capsys.readouterr().err
