"""train.py and test.py in this process: options of the mm tools, and one message for what cannot run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from shapes import write_shapes
from test_end_to_end import CONFIG

from mmgate.train import cli

ON_A_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason='runs here')


@pytest.fixture(scope='module')
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('data')
    write_shapes(folder / 'shapes', num_train=4, num_val=2, size=64)
    return folder


@pytest.fixture
def project(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / 'config.py').write_text(CONFIG.replace('EPOCHS', '1'))
    shutil.copytree(data, tmp_path / 'data')
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv('MMGATE_TRACEBACK', raising=False)
    monkeypatch.setenv('TRITON_INTERPRET', '0')
    return tmp_path


def run(command: str, *arguments: str, name: str) -> int:
    options = [f'experiment_name={name}', 'visualizer.name=' + name]
    given = list(arguments)
    if '--cfg-options' not in given:
        given.append('--cfg-options')
    return cli.main(getattr(cli, command), ['config.py', '--work-dir', 'work', *given, *options])


def test_options_of_the_mm_tools(project: Path) -> None:
    options = [
        'train_dataloader.pin_memory=False',
        'optim_wrapper.paramwise_cfg.norm_decay_mult=0.0',
        'model.test_cfg.score_thr=0.1',
        'auto_scale_lr.enable=True',
        'env_cfg.resource_limit=4096',
        'activation_checkpointing=[backbone.layer1]',
    ]
    assert run('train', '--cfg-options', *options, name='options') == 0
    assert (project / 'work/epoch_1.pth').exists()


@pytest.mark.parametrize(
    'arguments, message',
    [
        pytest.param(
            ['--cfg-options', 'model.attention.backend=triton'],
            "backend 'triton' cannot run here: it is for CUDA tensors",
            marks=ON_A_GPU,
            id='backend',
        ),
        pytest.param(['--cfg-options', 'model.neck.in_channels.7=1'], 'model.neck.in_channels.7', id='index'),
        pytest.param(
            ['--auto-accumulate', '--cfg-options', 'train_dataloader.batch_size=3'],
            '1 processes x 3 images = 3 at a time, and 8 a step is no multiple',
            id='accumulation',
        ),
    ],
)
def test_said_before_training(
    project: Path, capsys: pytest.CaptureFixture, request: pytest.FixtureRequest, arguments: list[str], message: str
) -> None:
    assert run('train', *arguments, name=request.node.callspec.id) == 2
    error = capsys.readouterr().err
    assert 'error: ' in error and message in error and 'Traceback' not in error
    assert not list(project.rglob('*.pth'))


def test_accumulation_reaches_the_base_batch_and_is_logged(project: Path) -> None:
    assert run('train', '--auto-accumulate', name='accumulated') == 0
    cfg = Config.fromfile(project / 'work/config.py')
    assert cfg.train_dataloader.batch_size * cfg.optim_wrapper.accumulative_counts == 8
    log = next((project / 'work').glob('*/*.log')).read_text()
    assert '1 processes x 2 images = 2 at a time, accumulated over 4 = 8 a step' in log


def test_a_checkpoint_of_another_model(project: Path, capsys: pytest.CaptureFixture) -> None:
    weights = {f'backbone.unknown{i}.weight': torch.zeros(1) for i in range(9)}
    torch.save(dict(state_dict=weights, meta={}), 'other.pth')
    assert run('test', 'other.pth', name='other') == 2
    error = capsys.readouterr().err
    assert 'error: 0 of ' in error and 'give --allow-mismatch' in error
    assert run('test', 'other.pth', '--allow-mismatch', name='mismatch') == 0
    fewer = ['--allow-mismatch', '--cfg-options', 'model.bbox_head.num_classes=2']
    assert run('test', 'other.pth', *fewer, name='fewer') == 0
    logs = ''.join(log.read_text() for log in project.rglob('*.log'))
    assert 'bbox_head (DeformableDETRHead) predicts 2 classes, and CocoDataset has 6' in logs


@pytest.mark.parametrize(
    'state, arguments, status, message',
    [
        ('foreign', ['--cfg-options', 'load_from=some.pth'], 2, '0 of .* keys .* were loaded from some.pth'),
        ('head', ['--cfg-options', 'load_from=some.pth'], 0, 'keys of DeformableDETR were loaded from some.pth'),
        ('head', ['--resume', 'some.pth'], 2, 'some.pth holds weights alone.*load_from=some.pth'),
        ('head', ['--resume', 'config.py'], 2, 'config.py is no torch checkpoint'),
    ],
    ids=['nothing_fits', 'little_fits', 'resume_from_weights', 'unreadable'],
)
def test_checkpoints_to_start_from(
    project: Path, state: str, arguments: list[str], status: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = {'foreign': 'backbone.nothing', 'head': 'query_embedding.weight'}
    weight = torch.zeros(30, 256)
    torch.save({'state_dict': {keys[state]: weight}}, project / 'some.pth')
    assert run('train', *arguments, name=f'start_{state}_{status}_{arguments[-1]}') == status
    output, errors = capfd.readouterr()
    assert re.search(message, output + errors, re.DOTALL)
