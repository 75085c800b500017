"""train.py and test.py in this process: options of the mm tools, and mistakes, which end in one message."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from helpers.small_demo import CONFIG
from shapes import write_shapes

from mmgate.mm import cli

DETECTOR = CONFIG.replace('EPOCHS', '1')
ON_A_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason='runs here')


class Mistake(NamedTuple):
    """What the message says, and what is wrong in the config."""

    message: str
    config: str


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
    Path('base.py').write_text(DETECTOR)
    Path('config.py').write_text(f"_base_ = 'base.py'\n{mistake.config}\n")
    status = run('train', name=name)
    error = capsys.readouterr().err
    assert status == 2 and not list(project.rglob('*.pth')), error
    message = error[error.index('error: ') :]
    assert re.search(mistake.message, message, re.DOTALL), message
    assert 'Traceback' not in message


def test_options_of_the_mm_tools(project: Path) -> None:
    options = [
        *('train_dataloader.pin_memory=False', 'optim_wrapper.paramwise_cfg.norm_decay_mult=0.0'),
        *('model.test_cfg.score_thr=0.1', 'env_cfg.resource_limit=4096', 'optim_wrapper.accumulative_counts=4'),
        'activation_checkpointing=[backbone.layer1]',
    ]
    assert run('train', '--auto-scale-lr', '--cfg-options', *options, name='options') == 0
    assert (project / 'work/epoch_1.pth').exists()
    assert 'Scaling the original LR by 0.25' in logs()


def test_a_checkpoint_of_another_model(project: Path, capsys: pytest.CaptureFixture) -> None:
    weights = {f'backbone.unknown{i}.weight': torch.zeros(1) for i in range(9)}
    torch.save(dict(state_dict=weights, meta={}), 'other.pth')
    assert run('test', 'other.pth', name='other') == 2
    error = capsys.readouterr().err
    assert 'error: 0 of ' in error and 'give --allow-mismatch' in error
    fewer = ['--allow-mismatch', '--cfg-options', 'model.bbox_head.num_classes=2']
    assert run('test', 'other.pth', *fewer, name='fewer') == 0


@pytest.mark.parametrize(
    'key, arguments, status, message',
    [
        ('no.key', ['--cfg-options', 'load_from=some.pth'], 2, '0 of .* keys .* were loaded from some.pth'),
        ('query_embedding.weight', ['--cfg-options', 'load_from=some.pth'], 0, 'keys of DeformableDETR were loaded'),
        ('no.key', ['--resume', 'some.pth'], 2, 'some.pth holds nothing but weights.*load_from=some.pth'),
        ('no.key', ['--resume', 'config.py'], 2, 'checkpoint config.py cannot be read'),
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
