"""Mistakes that plain mm tools do not name: each ends in one message that says what to change, or is said once."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import pytest
from conftest import ROOT
from shapes import write_shapes
from test_end_to_end import CONFIG
from test_environment import SEGMENTOR

from mmgate.train import cli

LOADERS = """
train_dataloader = dict(batch_size=2, num_workers=0, persistent_workers=False)
val_dataloader = test_dataloader = dict(num_workers=0, persistent_workers=False)
train_cfg = dict(max_epochs=1, val_interval=100)
"""
CONFIGS = {
    'boxes': CONFIG.replace('EPOCHS', '1'),
    'masks': f'_base_ = {str(ROOT / "configs/agent/mask_rcnn/agent-mask-rcnn_pvt-demo_1xb8-8e_shapes.py")!r}' + LOADERS,
    'maps': SEGMENTOR,
}
TRAIN = 'data/shapes/annotations/instances_train.json'
MAP = 'data/shapes/ade/annotations/training/000000.png'


@dataclass(frozen=True)
class Mistake:
    """What is trained, what is wrong with it, and what the message says; ``goes_on``: it is a warning."""

    kind: str
    message: str
    config: str = ''
    damage: Callable[[], Any] | None = None
    goes_on: bool = False


def rename_categories(*numbers: int) -> None:
    content = json.loads(Path(TRAIN).read_text())
    for number in numbers:
        content['categories'][number]['name'] = content['categories'][number]['name'].upper()
    Path(TRAIN).write_text(json.dumps(content))


def paint_map() -> None:
    """Number 50 in a corner; the data set's folders share files."""
    labels = cv2.imread(MAP, cv2.IMREAD_UNCHANGED)
    Path(MAP).unlink()
    labels[:4, :4] = 50
    cv2.imwrite(MAP, labels)


def dataset(text: str) -> str:
    return f'train_dataloader = dict(dataset=dict({text}))'


MISTAKES = {
    'gate_misspelt': Mistake(
        'boxes',
        'Did you mean .*PLuGMultiScaleDeformableAttention',
        "model = dict(attention=dict(type='PLuGMultiScaleDeformableAtention'))",
    ),
    'gate_option_misspelt': Mistake('boxes', 'no option granularty', "model = dict(attention=dict(granularty='head'))"),
    'host_misspelt': Mistake('boxes', 'DeformableDERT', "model = dict(host='mmdet.DeformableDERT')"),
    'path_of_nothing': Mistake(
        'boxes', 'matches no module.*encoder.layers.0.self_attn', "model = dict(attention=dict(path='encoder.*.attn'))"
    ),
    'agents': Mistake(
        'masks', 'agent_num=10 must be a square number', 'model = dict(backbone=dict(agent_nums=(10, 16, 49, 49)))'
    ),
    'no_annotations': Mistake(
        'boxes', 'train_dataloader.dataset.ann_file: .*a.json does not', dataset("ann_file='a.json'")
    ),
    'other_categories': Mistake(
        'boxes',
        'train_dataloader: none of the classes .circle.* is a category of .*, which has CIRCLE',
        damage=lambda: rename_categories(*range(6)),
    ),
    'other_categories_and_images_without_boxes_dropped': Mistake(
        'boxes',
        'train_dataloader: none of the classes .circle.* is a category of .*, which has CIRCLE',
        dataset('filter_cfg=dict(filter_empty_gt=True)'),
        damage=lambda: rename_categories(*range(6)),
    ),
    'another_category': Mistake(
        'boxes',
        'has 5 of the 6 classes as categories; it lacks square',
        damage=lambda: rename_categories(1),
        goes_on=True,
    ),
    'more_classes_than_the_data': Mistake(
        'boxes',
        'bbox_head .* predicts 80 classes',
        'model = dict(bbox_head=dict(num_classes=80))\nval_dataloader = val_cfg = val_evaluator = None',
        goes_on=True,
    ),
}


@pytest.fixture(scope='module')
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('data')
    write_shapes(folder / 'shapes', num_train=4, num_val=2, size=64)
    return folder


@pytest.fixture
def project(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(data, tmp_path / 'data')
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv('MMGATE_TRACEBACK', raising=False)
    return tmp_path


def make(mistake: Mistake) -> None:
    Path('base.py').write_text(CONFIGS[mistake.kind])
    Path('config.py').write_text(f"_base_ = 'base.py'\n{mistake.config}\n")
    if mistake.damage is not None:
        mistake.damage()


def train(name: str, *options: str) -> int:
    unique = [f'experiment_name={name}', f'visualizer.name={name}']
    return cli.main(cli.train, ['config.py', '--work-dir', 'work', '--cfg-options', *unique, *options])


def log() -> str:
    return next(Path('work').glob('*/*.log')).read_text()


@pytest.mark.parametrize('name', MISTAKES)
def test_one_message_says_what_to_change(project: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    mistake = MISTAKES[name]
    make(mistake)
    status = train(name)
    error = capsys.readouterr().err
    if mistake.goes_on:
        assert status == 0 and len(re.findall(mistake.message, log())) == 1
        return
    assert status == 2, error
    message = error[error.index('error: ') :]
    assert re.search(mistake.message, message, re.DOTALL), message
    assert 'Traceback' not in message


def test_a_label_beyond_the_classes_is_named_before_torch_meets_it(project: Path) -> None:
    make(Mistake('maps', '', damage=paint_map))
    with pytest.raises(Exception, match=r'.'):  # torch's own words, which name no file
        train('beyond')
    assert re.search(f'{MAP} holds the number 50, label 49 of the data, and the model predicts labels 0 to 5', log())


def test_an_error_of_the_hosts_keeps_its_traceback(project: Path) -> None:
    make(Mistake('boxes', '', 'model = dict(encoder=dict(layer_cfg=dict(self_attn_cfg=dict(num_heads=7))))'))
    with pytest.raises(ValueError, match='embed_dims must be divisible by num_heads, but got 128 and 7') as raised:
        train('heads')
    assert type(raised.value) is ValueError


def test_a_config_can_leave_the_check_out(project: Path) -> None:
    make(MISTAKES['other_categories'])
    assert train('unchecked', 'check_data=False') == 0
    assert 'none of the classes' not in log()
