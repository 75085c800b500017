"""train.py and test.py in this process: options of the mm tools, and mistakes, which end in one message or are said."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import pytest
import torch
from helpers.small_demo import CONFIG, SEGMENTOR
from mmengine.config import Config
from shapes import write_shapes

from mmgate.train import cli

DETECTOR = CONFIG.replace('EPOCHS', '1')
TRAIN = 'data/shapes/annotations/instances_train.json'
MAP = 'data/shapes/ade/annotations/training/000000.png'
ON_A_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason='runs here')


class Mistake(NamedTuple):
    """What the message says, and what is wrong: in the config or in the data."""

    message: str
    config: str = ''
    damage: Callable[[], Any] | None = None
    goes_on: bool = False  # it is a warning


def rename_categories() -> None:
    content = json.loads(Path(TRAIN).read_text())
    for category in content['categories']:
        category['name'] = category['name'].upper()
    Path(TRAIN).write_text(json.dumps(content))


def paint_map() -> None:
    """Number 50 in a corner; the data set's folders share files."""
    labels = cv2.imread(MAP, cv2.IMREAD_UNCHANGED)
    Path(MAP).unlink()
    labels[:4, :4] = 50
    cv2.imwrite(MAP, labels)


def dataset(text: str) -> str:
    return f'train_dataloader = dict(dataset=dict({text}))'


FOREIGN = 'train_dataloader: none of the classes .circle.* is a category of .*, which has CIRCLE'
MISTAKES = {
    'gate_misspelt': Mistake(
        r'Did you mean\n  PLuGMultiScaleDeformableAttention',
        "model = dict(attention=dict(type='PLuGMultiScaleDeformableAtention'))",
    ),
    'host_missing': Mistake(
        'mmgate.Gated needs host', "model = dict(_delete_=True, type='mmgate.Gated', attention=[])"
    ),
    'host_misspelt': Mistake('DeformableDERT', "model = dict(host='mmdet.DeformableDERT')"),
    'path_of_nothing': Mistake(
        'matches no module.*encoder.layers.0.self_attn', "model = dict(attention=dict(path='encoder.*.attn'))"
    ),
    'no_annotations': Mistake('train_dataloader.dataset.ann_file: .*a.json does not', dataset("ann_file='a.json'")),
    'no_pretrained_weights': Mistake(
        r'model\.backbone\.init_cfg\.checkpoint: checkpoint no\.pth does not exist',
        "model = dict(backbone=dict(init_cfg=dict(_delete_=True, type='Pretrained', checkpoint='no.pth')))",
    ),
    'other_categories': Mistake(FOREIGN, damage=rename_categories),
    'other_categories_and_images_without_boxes_dropped': Mistake(
        FOREIGN, dataset('filter_cfg=dict(filter_empty_gt=True)'), rename_categories
    ),
    'more_classes_than_the_data': Mistake(
        'bbox_head .* predicts 80 classes',
        'model = dict(bbox_head=dict(num_classes=80))\nval_dataloader = val_cfg = val_evaluator = None',
        goes_on=True,
    ),
    'backend': Mistake(
        r'encoder\.layers\.0\.self_attn\.gate: '
        "ms_deform_attn: backend 'triton' cannot run here: it is for CUDA tensors",
        "model = dict(attention=dict(backend='triton'))",
    ),
}


@pytest.fixture(scope='module')
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('data')
    write_shapes(folder / 'shapes', num_train=4, num_val=2, size=64)
    return folder


@pytest.fixture
def project(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / 'config.py').write_text(DETECTOR)
    shutil.copytree(data, tmp_path / 'data')
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv('MMGATE_TRACEBACK', raising=False)
    monkeypatch.setenv('TRITON_INTERPRET', '0')
    return tmp_path


def make(mistake: Mistake, base: str = DETECTOR) -> None:
    Path('base.py').write_text(base)
    Path('config.py').write_text(f"_base_ = 'base.py'\n{mistake.config}\n")
    if mistake.damage is not None:
        mistake.damage()


def run(command: str, *arguments: str, name: str) -> int:
    given = list(arguments)
    if '--cfg-options' not in given:
        given.append('--cfg-options')
    unique = [f'experiment_name={name}', f'visualizer.name={name}']
    return cli.main(getattr(cli, command), ['config.py', '--work-dir', 'work', *given, *unique])


def logs() -> str:
    return ''.join(log.read_text() for log in Path('work').glob('*/*.log'))


@pytest.mark.parametrize('name', [pytest.param(name, marks=[ON_A_GPU] * (name == 'backend')) for name in MISTAKES])
def test_one_message_says_what_to_change(project: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    mistake = MISTAKES[name]
    make(mistake)
    status = run('train', name=name)
    error = capsys.readouterr().err
    if mistake.goes_on:
        assert status == 0 and len(re.findall(mistake.message, logs())) == 1
        return
    assert status == 2 and not list(project.rglob('*.pth')), error
    message = error[error.index('error: ') :]
    assert re.search(mistake.message, message, re.DOTALL), message
    assert 'Traceback' not in message


def test_a_label_beyond_the_classes_is_named_before_torch_meets_it(project: Path) -> None:
    make(Mistake('', damage=paint_map), SEGMENTOR)
    with pytest.raises(Exception, match=r'.'):  # torch's own words, which name no file
        run('train', name='beyond')
    assert re.search(f'{MAP} holds the number 50, label 49 of the data, and the model predicts labels 0 to 5', logs())


def test_a_config_can_leave_the_check_out(project: Path) -> None:
    make(MISTAKES['other_categories'])
    assert run('train', '--cfg-options', 'check_data=False', name='unchecked') == 0
    assert 'none of the classes' not in logs()


def test_options_of_the_mm_tools(project: Path) -> None:
    options = [
        *('train_dataloader.pin_memory=False', 'optim_wrapper.paramwise_cfg.norm_decay_mult=0.0'),
        *('model.test_cfg.score_thr=0.1', 'auto_scale_lr.enable=True', 'env_cfg.resource_limit=4096'),
        'activation_checkpointing=[backbone.layer1]',
    ]
    assert run('train', '--auto-accumulate', '--cfg-options', *options, name='options') == 0
    assert (project / 'work/epoch_1.pth').exists()
    cfg = Config.fromfile(project / 'work/config.py')
    assert cfg.train_dataloader.batch_size * cfg.optim_wrapper.accumulative_counts == 8
    assert '1 processes x 2 images = 2 at a time, accumulated over 4 = 8 a step' in logs()


def test_a_checkpoint_of_another_model(project: Path, capsys: pytest.CaptureFixture) -> None:
    weights = {f'backbone.unknown{i}.weight': torch.zeros(1) for i in range(9)}
    torch.save(dict(state_dict=weights, meta={}), 'other.pth')
    assert run('test', 'other.pth', name='other') == 2
    error = capsys.readouterr().err
    assert 'error: 0 of ' in error and 'give --allow-mismatch' in error
    fewer = ['--allow-mismatch', '--cfg-options', 'model.bbox_head.num_classes=2']
    assert run('test', 'other.pth', *fewer, name='fewer') == 0
    assert 'bbox_head (MatchedOnceDeformableDETRHead) predicts 2 classes, and CocoDataset has 6' in logs()


@pytest.mark.parametrize(
    'key, arguments, status, message',
    [
        ('no.key', ['--cfg-options', 'load_from=some.pth'], 2, '0 of .* keys .* were loaded from some.pth'),
        ('query_embedding.weight', ['--cfg-options', 'load_from=some.pth'], 0, 'keys of DeformableDETR were loaded'),
        ('no.key', ['--resume', 'some.pth'], 2, 'some.pth holds weights alone.*load_from=some.pth'),
        ('no.key', ['--resume', 'config.py'], 2, 'config.py is no torch checkpoint'),
    ],
    ids=['nothing_fits', 'little_fits', 'resume_from_weights', 'unreadable'],
)
def test_checkpoints_to_start_from(
    project: Path, key: str, arguments: list[str], status: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    # with what is left of a run in one that was published, or into which gates were merged
    torch.save({'state_dict': {key: torch.zeros(30, 256)}, 'meta': dict(iter=1, epoch=1)}, project / 'some.pth')
    assert run('train', *arguments, name=f'start_{key}_{status}_{arguments[-1]}') == status
    output, errors = capfd.readouterr()
    assert re.search(message, output + errors, re.DOTALL)
