"""Starts that cannot work, or hardly: other gates than the run had, gates on random weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.model import BaseModel, BaseModule
from mmengine.registry import DATASETS, MODELS
from torch import Tensor, nn

import mmgate
from mmgate.finetune.training import frozen_parts_without_weights
from mmgate.train import cli

CONFIG = """
model = dict(
    type='mmgate.Gated',
    host='StartedNet',
    attention=[
        dict(path='first.attn', type='PLuGMultiheadAttention'),
        dict(path='second.attn', type='PLuGMultiheadAttention')])
train_dataloader = dict(
    batch_size=2,
    dataset=dict(type='StartedNoise'),
    collate_fn=dict(type='default_collate'),
    sampler=dict(type='InfiniteSampler', shuffle=False))
optim_wrapper = dict(
    constructor='mmgate.GateOptimWrapperConstructor',
    optimizer=dict(type='AdamW', lr=1e-3))
train_cfg = dict(by_epoch=False, max_iters=LAST)
default_hooks = dict(checkpoint=dict(type='CheckpointHook', interval=1, by_epoch=False))
"""


@DATASETS.register_module()
class StartedNoise(torch.utils.data.Dataset):
    metainfo: dict = {}

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return dict(x=torch.full((3, 8), float(index)))


class Layer(BaseModule):
    def __init__(self, init_cfg: Any = None) -> None:
        super().__init__(init_cfg)
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x, x, x)[0]


@MODELS.register_module()
class StartedNet(BaseModel):
    def __init__(self, first: Any = None, init_cfg: Any = None) -> None:
        super().__init__(init_cfg=init_cfg)
        self.first, self.second, self.head = Layer(first), Layer(), nn.Linear(8, 1)

    def forward(self, x: Tensor, mode: str = 'tensor') -> dict[str, Tensor]:
        return dict(loss=self.head(self.second(self.first(x))).square().mean())


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run of one step, with both gates."""
    folder = tmp_path_factory.mktemp('started')
    (folder / 'config.py').write_text(CONFIG.replace('LAST', '1'))
    assert cli.main(cli.train, [str(folder / 'config.py'), '--work-dir', str(folder)]) == 0
    return folder / 'iter_1.pth'


def train(folder: Path, changes: str, *arguments: str) -> tuple[int, str]:
    """Return the status and the log of a run whose config has two steps and these ``changes``."""
    (folder / 'base.py').write_text(CONFIG.replace('LAST', '2'))
    (folder / 'config.py').write_text(f"_base_ = 'base.py'\n{changes}\n")
    unique = ['--cfg-options', f'experiment_name={folder.name}']
    status = cli.main(cli.train, [str(folder / 'config.py'), '--work-dir', str(folder / 'work'), *unique, *arguments])
    return status, ''.join(log.read_text() for log in folder.glob('work/*/*.log'))


def rules(first: str = '', second: str | None = '') -> str:
    listed = [f"dict(path='first.attn', type='PLuGMultiheadAttention', {first})"]
    if second is not None:
        listed.append(f"dict(path='second.attn', type='PLuGMultiheadAttention', {second})")
    return f'model = dict(attention=[{", ".join(listed)}])'


LR = "dict(paramwise_cfg=dict(custom_keys={'mmgate.gates': dict(lr_mult=9.0)}))"
VANILLA = "model = dict(_delete_=True, type='StartedNet')"
CHANGES = {
    'another_gml': (
        rules("gml='single'"),
        r'first.attn.gate.gml.weight is \(2,\) in it and \(1,\) .* since: model.attention.0.gml: not set -> .single',
    ),
    'of_the_second': (rules('', "gml='mlp'"), r"it has no second.*since: model.attention.1.gml: not set -> 'mlp'"),
    'fewer_gates': (rules('', None), r'it has second.attn.gate.*no such gate.*model.attention.1: {.*} -> not set'),
    'no_gates': (VANILLA, r'it has first.attn.gate.*no such gate.*model.attention: \['),
    'many_settings': (
        rules("gml='single', activation='tanh', init='paper'", "gml='single', activation='tanh'"),
        r'first.attn.gate.gml.weight is .* since: model.attention.0.*; .*; .* and 2 more\. Give the config',
    ),
    'a_rate_of_their_own': (
        f'optim_wrapper = {LR}',
        r'its optimizer has .*optim_wrapper.paramwise_cfg: not set',
    ),
}


@pytest.mark.parametrize(('changes', 'said'), list(CHANGES.values()), ids=list(CHANGES))
def test_a_run_is_not_resumed_with_other_gates(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: str, said: str
) -> None:
    """The optimizer's state would be of other tensors."""
    status, _ = train(tmp_path, changes, '--resume', str(checkpoint))
    error = capsys.readouterr().err
    line = error[error.index('error: ') :].strip()
    assert status == 2 and '\n' not in line
    assert re.search(f'iter_1.pth cannot be resumed: {said}', line), line
    assert line.endswith(f'--cfg-options load_from={checkpoint}, without --resume.')


def test_a_run_from_before_groups_were_merged_is_resumed(tmp_path: Path) -> None:
    """It goes on in the groups in which it began, where a new run has them merged."""
    paramwise = 'paramwise_cfg=dict(custom_keys=dict(head=dict(lr_mult=0.1)))'
    sizes = []
    for constructor, length in (('DefaultOptimWrapperConstructor', 1), ('mmgate.GroupedOptimWrapperConstructor', 2)):
        (tmp_path / 'config.py').write_text(
            CONFIG.replace('LAST', str(length)).replace('mmgate.GateOptimWrapperConstructor', constructor)
            + f'optim_wrapper.update({paramwise})\n'
        )
        arguments = [str(tmp_path / 'config.py'), '--work-dir', str(tmp_path), '--resume']
        arguments += ['--cfg-options', f'experiment_name={tmp_path.name}{length}']
        assert cli.main(cli.train, arguments) == 0
        saved = torch.load(tmp_path / f'iter_{length}.pth', weights_only=False)['optimizer']
        sizes.append([len(group['params']) for group in saved['param_groups']])
    assert len(sizes[0]) > 2 and sizes[1] == sizes[0]
    assert {float(state['step']) for state in saved['state'].values()} == {2.0}


def test_rules_that_still_fit_are_warned_of(checkpoint: Path, tmp_path: Path) -> None:
    status, log = train(tmp_path, rules("gml='sum', backend='chunked'"), '--resume', str(checkpoint))
    assert status == 0
    (line,) = [line for line in log.splitlines() if 'by other rules' in line]
    assert 'WARNING' in line and line.endswith("model.attention.0.gml: not set -> 'sum'.")


@pytest.mark.parametrize(
    ('before', 'now', 'said'),
    [
        ('all', 'gates', r"model.train: .* -> 'gates'. .* that of the 10 now frozen is dropped"),
        ('gates', 'attention', r"model.train: 'gates' -> 'attention'. .* start without a state of the optimizer\.$"),
        ('all', 'all', ''),
    ],
)
def test_another_train_is_warned_of_and_the_frozen_keep_no_state(
    checkpoint: Path, tmp_path: Path, before: str, now: str, said: str
) -> None:
    """The run of the fixture does not name what trains, which is all."""
    if before != 'all':
        (tmp_path / before).mkdir()
        train(tmp_path / before, f"model = dict(train='{before}')")
        checkpoint = tmp_path / before / 'work/iter_1.pth'
    status, log = train(tmp_path, f"model = dict(train='{now}')", '--resume', str(checkpoint))
    warned = [line for line in log.splitlines() if 'in which other parameters trained' in line]
    assert status == 0 and len(warned) == bool(said) and all(re.search(said, line) for line in warned), warned
    state = torch.load(tmp_path / 'work/iter_2.pth', weights_only=False)['optimizer']
    model = StartedNet()
    mmgate.swap_attention(model, dict(path='*.attn', type='PLuGMultiheadAttention'))
    trained = mmgate.train_only_gates(model, now)
    assert len(state['state']) == len(trained)


@pytest.mark.parametrize('train_mode', ['gates', 'all'])
@pytest.mark.parametrize('start', ['random', 'checkpoint', 'resumed'])
def test_gates_on_random_weights(checkpoint: Path, tmp_path: Path, start: str, train_mode: str) -> None:
    given = dict(random=[], checkpoint=[f'load_from={checkpoint}'], resumed=['--resume', str(checkpoint)])[start]
    status, log = train(tmp_path, f"model = dict(train='{train_mode}')", *given)
    warned = re.findall('neither load_from nor init_cfg fills first, second, head. Give the checkpoint', log)
    assert status == 0 and len(warned) == (start == 'random' and train_mode == 'gates')


PRETRAINED = dict(type='Pretrained', checkpoint='x.pth')


@pytest.mark.parametrize(
    ('options', 'parts'),
    [
        ({}, ['first', 'second', 'head']),
        (dict(init_cfg=dict(type='Normal', layer='Linear')), ['first', 'second', 'head']),
        (dict(first=PRETRAINED), ['second', 'head']),
        (dict(first=[dict(type='Normal', layer='Linear'), PRETRAINED]), ['second', 'head']),
        (dict(init_cfg=PRETRAINED), []),
    ],
    ids=['none', 'drawn', 'a part', 'a list', 'the whole'],
)
def test_frozen_parts_without_weights(options: dict[str, Any], parts: list[str]) -> None:
    model = StartedNet(**options)
    mmgate.swap_attention(model, dict(path='*.attn', type='PLuGMultiheadAttention'))
    assert frozen_parts_without_weights(model) == []  # everything trains
    mmgate.train_only_gates(model)
    assert frozen_parts_without_weights(model) == parts
    assert frozen_parts_without_weights(nn.DataParallel(model)) == parts
