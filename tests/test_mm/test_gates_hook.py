"""Gates trained alone through the command lines: files of gates, resuming, testing with --gates, the converter."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import needs_mmpretrain, tool
from helpers.small_demo import logged, run, write_demo
from mmengine.fileio import load
from torch import nn

import mmgate
from mmgate.checkpoints.gates_file import read_gates
from mmgate.errors import ConfigError
from mmgate.mm import cli
from mmgate.mm.gates_hook import GatesCheckpointHook

CONVERTER = tool('gates', 'model_converters')
GATES = """
_base_ = './gated.py'
load_from = 'vanilla/epoch_1.pth'
model = dict(train='gates')
custom_hooks = [dict(type='mmgate.GatesCheckpointHook', max_keep_ckpts=1)]
optim_wrapper = dict(optimizer=dict(lr=1.0))
train_dataloader = dict(dataset=dict(indices=2))
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a vanilla checkpoint and gates that were trained alone, resumed once."""
    folder = write_demo(tmp_path_factory.mktemp('gates'))
    (folder / 'gates.py').write_text(GATES)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run(cli.train, 'vanilla.py', '--work-dir', 'vanilla')
        run(cli.train, 'gates.py', '--work-dir', 'gates', '--cfg-options', 'train_cfg.max_epochs=2')
        run(cli.train, 'gates.py', '--work-dir', 'gates', '--resume', '--cfg-options', 'train_cfg.max_epochs=3')
    return folder


@pytest.fixture
def project(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def state(path: str, key: str = 'state_dict') -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=False)[key]


def boxes(file: str) -> list[torch.Tensor]:
    return [sample['pred_instances'][key] for sample in load(file) for key in ('bboxes', 'scores')]


def test_files_stand_beside_the_checkpoints(project: Path) -> None:
    names = sorted(path.name for path in Path('gates').glob('*.safetensors'))
    assert names == ['epoch_3.gates.safetensors']  # the file from before the run was resumed counts
    whole, vanilla = state('gates/epoch_3.pth'), state('vanilla/epoch_1.pth')
    for name, tensor in vanilla.items():  # what is frozen is equal bit for bit
        assert torch.equal(whole[name], tensor), name
    gates = set(whole) - set(vanilla)
    assert gates == set(read_gates('gates/epoch_3.gates.safetensors').tensors)
    assert len(state('gates/epoch_3.pth', 'optimizer')['state']) == len(gates)


def test_a_vanilla_config_and_checkpoint_with_a_file(project: Path) -> None:
    run(cli.test, 'gates.py', 'gates/epoch_3.pth', '--work-dir', 'whole', '--out', 'whole.pkl')
    file = ['--gates', 'gates/epoch_3.gates.safetensors']
    for config in ('vanilla', 'gated'):
        given = [f'{config}.py', 'vanilla/epoch_1.pth', '--out', f'{config}.pkl']
        run(cli.test, *given, '--work-dir', f'with_{config}', *file)
        torch.testing.assert_close(boxes(f'{config}.pkl'), boxes('whole.pkl'))
        said = logged(f'with_{config}')
        assert 'of gates are from gates/epoch_3.gates.safetensors' in said
        assert 'not loaded' not in said and 'other values' not in said
    run(cli.test, 'vanilla.py', 'vanilla/epoch_1.pth', '--work-dir', 'without', '--out', 'without.pkl')
    assert any(not torch.equal(one, other) for one, other in zip(boxes('without.pkl'), boxes('whole.pkl'), strict=True))


def test_gates_of_a_file_that_a_checkpoint_replaces_are_warned_of(project: Path) -> None:
    options = ['--gates', 'gates/epoch_3.gates.safetensors', '--cfg-options', 'load_from=gates/epoch_3.pth']
    run(cli.train, 'vanilla.py', '--work-dir', 'both', *options)
    assert 'gates/epoch_3.pth has gates, which replaced those of --gates' in logged('both')


def test_in_place_of_whole_checkpoints(project: Path) -> None:
    """With the max_keep_ckpts=2 that the config has for whole ones, and in iterations, which the loop counts."""
    loop = "dict(_delete_=True, type='IterBasedTrainLoop', max_iters=3, val_interval=100)"
    hooks = "checkpoint=dict(type='mmgate.GatesCheckpointHook')"
    text = f"_base_ = './gates.py'\ncustom_hooks = []\ntrain_cfg = {loop}\ndefault_hooks = dict({hooks})\n"
    Path('alone.py').write_text(text)
    run(cli.train, 'alone.py', '--work-dir', 'alone')
    names = sorted(path.name for path in Path('alone').iterdir() if path.suffix in ('.pth', '.safetensors'))
    assert names == ['iter_2.gates.safetensors', 'iter_3.gates.safetensors']
    with pytest.raises(ConfigError, match=r'has no save_best, rule. .*_delete_=True'):
        GatesCheckpointHook(save_best='auto', rule='greater')


def test_the_converter_takes_out_and_puts_in(project: Path) -> None:
    def convert(*arguments: str) -> None:
        assert cli.main(CONVERTER.main, list(arguments)) == 0

    convert('extract', 'gates.py', 'gates/epoch_3.pth', 'out.safetensors')
    expected, found = read_gates('gates/epoch_3.gates.safetensors'), read_gates('out.safetensors')
    assert found.places == expected.places and found.values == expected.values
    convert('merge', 'vanilla/epoch_1.pth', 'out.safetensors', 'merged.pth')
    merged, whole = state('merged.pth'), state('gates/epoch_3.pth')
    assert set(merged) == set(whole) and all(torch.equal(tensor, merged[name]) for name, tensor in whole.items())
    convert('extract', 'gates.py', 'gates/epoch_3.pth', 'also', '--cfg-options', 'model.train=attention')
    assert found.trained == 'gates' and set(read_gates('also').host_tensors) and not found.host_tensors


@pytest.mark.parametrize(
    ('command', 'arguments', 'message'),
    [
        ('merge', 'vanilla/epoch_1.pth gates.py gates.py', 'gates.py exists'),
        ('merge', 'vanilla/epoch_1.pth gates.py no/folder.pth', 'no such folder'),
        ('extract', 'gates.py vanilla/epoch_1.pth x', 'lacks .* parameters of the gates of gates.py, such as'),
        ('extract', 'gates.py nothing.pth x', 'nothing.pth is no file'),
        ('test', 'vanilla.py vanilla/epoch_1.pth --gates x', 'no such file of gates'),
        ('test', 'vanilla.py vanilla/epoch_1.pth --gates vanilla/epoch_1.pth', r'gates\.py extract CONFIG vanilla/ep'),
    ],
)
def test_errors_come_before_any_work(
    command: str, arguments: str, message: str, project: Path, capsys: pytest.CaptureFixture
) -> None:
    before = set(project.iterdir())
    if command == 'test':
        status = cli.main(cli.test, [*arguments.split(), '--work-dir', 'refused'])
    else:
        status = cli.main(CONVERTER.main, [command, *arguments.split()])
    assert status == 2 and re.search(message, capsys.readouterr().err)
    assert set(project.iterdir()) == before


@needs_mmpretrain
def test_a_file_has_the_averages_that_are_not_validated(tmp_path: Path) -> None:
    """As the whole checkpoint has them; mmpretrain's hook leaves it to options what is validated."""
    from mmpretrain.engine.hooks import EMAHook

    model = nn.ModuleDict(dict(attn=nn.MultiheadAttention(16, 2)))
    mmgate.swap_attention(model, dict(type='PLuGMultiheadAttention', path='attn'))
    mmgate.train_only_gates(model)
    averages = EMAHook(momentum=0.5, evaluate_on_ema=False, evaluate_on_origin=True)
    run = SimpleNamespace(model=model, hooks=[averages], work_dir=str(tmp_path), epoch=0, iter=0, max_epochs=1)
    averages.before_run(run)
    start = {name: gate.detach().clone() for name, gate in mmgate.gate_parameters(model).items()}
    for gate in mmgate.gate_parameters(model).values():
        gate.data += 1
    hook = GatesCheckpointHook(by_epoch=True)
    hook.before_train(run)
    hook.after_train_epoch(run)
    saved = read_gates(tmp_path / 'epoch_1.gates.safetensors').tensors
    torch.testing.assert_close(saved, start)
    torch.testing.assert_close(dict(mmgate.gate_parameters(model)), {name: x + 1 for name, x in start.items()})


def test_a_resumed_run_deletes_its_own_files_alone(tmp_path: Path) -> None:
    """Epochs that are still to come are another run's; names that no hook gives are the user's."""
    model = nn.ModuleDict(dict(attn=nn.MultiheadAttention(16, 2)))
    mmgate.swap_attention(model, dict(type='PLuGMultiheadAttention', path='attn'))
    mmgate.train_only_gates(model)
    names = [f'epoch_{which}.gates.safetensors' for which in (1, 2, 10, 12, '10_best', '10_1')]
    for name in names:
        (tmp_path / name).touch()
    run = SimpleNamespace(model=model, hooks=[], work_dir=str(tmp_path), epoch=10, iter=40, max_epochs=11)
    hook = GatesCheckpointHook(by_epoch=True, max_keep_ckpts=2)
    hook.before_train(run)
    hook.after_train_epoch(run)
    assert {path.name for path in tmp_path.iterdir()} == {*names[2:], 'epoch_11.gates.safetensors'}
