"""Strangers' checkpoints by our loaders: what mmengine saves loads, what would run code does not."""

from __future__ import annotations

import os
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mmengine.config import ConfigDict
from mmengine.evaluator import BaseMetric
from mmengine.logging import HistoryBuffer, MessageHub
from mmengine.model import BaseModel
from mmengine.optim.scheduler.param_scheduler import OneCycleParamScheduler
from mmengine.registry import PARAM_SCHEDULERS
from mmengine.runner import Runner
from mmengine.runner.checkpoint import CheckpointLoader
from torch import nn
from torch.utils.data import DataLoader

import mmgate  # noqa: F401
from mmgate.checkpoints.loading import UntrustedCheckpoint, guarded_loaders
from mmgate.checkpoints.tensors import read_checkpoint
from mmgate.checkpoints.unpickler import torchs_own_is_safe
from mmgate.errors import TRUST, ConfigError


@pytest.fixture(autouse=True, params=['ours', "torch's"])
def guarded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Load as in our command lines, by our unpickler and by torch's own safe loader where that is safe."""
    if request.param == 'ours':
        monkeypatch.setattr('mmgate.checkpoints.unpickler.torchs_own_is_safe', lambda: False)
    elif not torchs_own_is_safe():
        pytest.skip("torch's own loader is not used here")
    with guarded_loaders():
        yield


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function: Callable, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def marker(tmp_path: Path) -> Path:
    return tmp_path / 'code_ran'


ATTACKS: dict[str, Callable[[Path], Any]] = {
    'system': lambda tmp: Calls(os.system, f'touch {marker(tmp)}'),
    'eval': lambda tmp: Calls(eval, f"open({str(marker(tmp))!r}, 'w')"),
    'open': lambda tmp: Calls(open, str(marker(tmp)), 'w'),
    'getattr': lambda tmp: Calls(getattr, dict, 'fromkeys'),
    'torch_load': lambda tmp: Calls(torch.load, str(tmp / 'other.pth')),
    'private': lambda tmp: Calls(getattr, HistoryBuffer, '__init__'),
    'statistics': lambda tmp: Calls(getattr, HistoryBuffer, 'register_statistics'),
    'scheduler': lambda tmp: Calls(getattr, OneCycleParamScheduler, 'state_dict'),
    'objects': lambda tmp: np.zeros(1, 'object'),
    'text': lambda tmp: np.array(['x']),  # its state may have sizes that do not fit
    'structures': lambda tmp: np.zeros(1, [('a', 'i4')]),
    'scalar_type': lambda tmp: Calls(np.float32(0).__reduce__()[0], 'f4', bytes(4)),
    'scalar_content': lambda tmp: Calls(np.float32(0).__reduce__()[0], np.dtype('f4'), 'text'),
    # The file could then set the array's state anew, which frees the tensor's memory.
    'tensor_of_an_array': lambda tmp: Calls(
        torch._utils._rebuild_device_tensor_from_numpy, np.zeros(3), torch.float64, 'cpu', False
    ),
    'huge_array': lambda tmp: Calls(np.zeros(1).__reduce__()[0], np.ndarray, (1 << 40,), b'b'),
}


@pytest.mark.parametrize('place', ['top', 'meta', 'state_dict', 'list'])
@pytest.mark.parametrize('attack', ATTACKS)
@pytest.mark.parametrize('legacy', [False, True], ids=['zip', 'legacy'])
def test_code_does_not_run(attack: str, place: str, legacy: bool, tmp_path: Path) -> None:
    evil = ATTACKS[attack](tmp_path)
    content: Any = {
        'top': evil,
        'meta': dict(meta=dict(deep=[(evil,)]), state_dict={}),
        'state_dict': dict(state_dict=dict(weight=evil)),
        'list': [(evil, 1)],
    }[place]
    torch.save(content, tmp_path / 'evil.pth', _use_new_zipfile_serialization=not legacy)
    with pytest.raises(UntrustedCheckpoint, match='it was not loaded. If you trust whoever made it, pass --trust-ch'):
        CheckpointLoader.load_checkpoint(str(tmp_path / 'evil.pth'), map_location='cpu')
    assert not marker(tmp_path).exists()


@pytest.mark.parametrize('place', ['meta.config', 'meta.cfg', 'message_hub.runtime_info.cfg'])
@pytest.mark.parametrize('text, runs', [("model = dict(type='X')", False), ("__import__('os').system('true')", True)])
def test_a_config_that_would_run_is_left_out(
    text: str, runs: bool, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mmengine runs it as Python where it resumes, and in its inferencers; weights and the rest are loaded."""
    said: list[str] = []
    monkeypatch.setattr('mmgate.checkpoints.loading.log', lambda message, level: said.append(message))
    content: Any = text
    for key in reversed(place.split('.')):
        content = {key: content}
    torch.save(dict(content, state_dict=dict(weight=torch.ones(1))), tmp_path / 'a.pth')
    loaded = CheckpointLoader.load_checkpoint(str(tmp_path / 'a.pth'))
    assert loaded.pop('state_dict')['weight'] == 1
    for key in place.split('.')[:-1]:
        loaded = loaded[key]
    assert list(loaded) == ([] if runs else [place.rpartition('.')[2]])
    assert [('its config was left out' in line and '__import__' in line) for line in said] == [True] * runs


def test_a_config_that_a_method_of_the_file_hides_is_left_out(tmp_path: Path) -> None:
    meta: Any = OrderedDict(cfg="__import__('os').system('true')")
    meta.get = bool
    torch.save(dict(meta=meta, state_dict={}), tmp_path / 'a.pth')
    assert not CheckpointLoader.load_checkpoint(str(tmp_path / 'a.pth'))['meta']


@pytest.mark.parametrize(
    'kind', ['OneCycleLR', 'CosineAnnealingLR', 'MultiStepLR', 'PolyLR', 'LinearLR', 'ReduceOnPlateauLR']
)
def test_schedulers_come_back(kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = dict(
        OneCycleLR=dict(eta_max=0.1, total_steps=9),
        CosineAnnealingLR=dict(T_max=9),
        MultiStepLR=dict(milestones=[3]),
        ReduceOnPlateauLR=dict(monitor='loss'),
    ).get(kind, {})
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1, momentum=0.9)
    scheduler = PARAM_SCHEDULERS.build(dict(type=kind, optimizer=optimizer, **options))
    torch.save(scheduler.state_dict(), tmp_path / 'a.pth')
    loaded = CheckpointLoader.load_checkpoint(str(tmp_path / 'a.pth'))
    scheduler.load_state_dict(loaded)
    optimizer.step()
    if kind != 'ReduceOnPlateauLR':
        scheduler.step()


def test_trust_is_the_users_to_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(dict(meta=Calls(os.mkdir, str(marker(tmp_path)))), tmp_path / 'mine.pth')
    monkeypatch.setenv(TRUST, '1')
    read_checkpoint(str(tmp_path / 'mine.pth'))  # for a backbone, tensors alone
    assert not marker(tmp_path).exists()
    CheckpointLoader.load_checkpoint(str(tmp_path / 'mine.pth'))
    assert marker(tmp_path).exists()


def test_what_mmengine_saves_comes_back(tmp_path: Path) -> None:
    hub = MessageHub('test_safe_load')
    for value in (1.0, 3.0):
        hub.update_scalar('train/loss', value)
    hub.update_info('best', np.float32(0.25))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = dict(
        meta=dict(epoch=3, dataset_meta=dict(classes=('a',), palette=np.arange(6).reshape(2, 3))),
        state_dict=OrderedDict(model.state_dict(), half=torch.ones(1, dtype=torch.bfloat16), none=torch.ones(0)),
        message_hub=hub.state_dict(),
        optimizer=optimizer.state_dict(),
        param_schedulers=[dict(milestones=Counter([3, 5]))],
        others=[defaultdict(list), ConfigDict(a=dict(b=1)), torch.float16, Namespace(folder=Path('/tmp')), {1}, 1j],
        device=torch.device('cpu'),
        empty=np.zeros((0, 4)),
    )
    torch.save(saved, tmp_path / 'epoch_3.pth')
    loaded = CheckpointLoader.load_checkpoint(str(tmp_path / 'epoch_3.pth'), map_location='cpu')
    fresh = MessageHub('test_safe_load_fresh')
    fresh.load_state_dict(loaded['message_hub'])
    assert fresh.get_scalar('train/loss').mean() == 2.0 and fresh.get_scalar('train/loss').max() == 3.0
    assert fresh.get_info('best') == 0.25
    others = loaded['others']
    assert loaded['empty'].shape == (0, 4) and others[1].a.b == 1 and others[2] is torch.float16
    assert others[0] == {} and others[3].folder == Path('/tmp') and others[4:] == [{1}, 1j]
    np.testing.assert_array_equal(loaded['meta']['dataset_meta']['palette'], np.arange(6).reshape(2, 3))
    optimizer.load_state_dict(loaded['optimizer'])
    assert all(torch.equal(loaded['state_dict'][key], value) for key, value in saved['state_dict'].items())


class Toy(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x: Any, mode: str = 'loss') -> Any:
        loss = self.linear(x).square().mean()
        return dict(loss=loss) if mode == 'loss' else [loss]


class Score(BaseMetric):
    def process(self, *_: Any) -> None:
        self.results.append(1)

    def compute_metrics(self, _: Any) -> dict[str, Any]:
        return dict(score=np.float64(0.5))


def run(folder: Path, epochs: int, resume: bool = False) -> Runner:
    """Train with what mmengine may save: an optimizer, schedulers, averages, a history, the best score."""
    loader = DataLoader([dict(x=torch.ones(2))] * 4, batch_size=2)  # type: ignore[arg-type]
    schedulers = [
        dict(type='LinearLR', start_factor=0.1, by_epoch=False, end=2),
        dict(type='MultiStepLR', milestones=[1, 2]),
        dict(type='OneCycleLR', eta_max=0.1, total_steps=20, by_epoch=False),
    ]
    runner = Runner(
        Toy(),
        str(folder),
        train_dataloader=loader,
        val_dataloader=loader,
        val_evaluator=[Score(prefix='a')],
        val_cfg={},
        train_cfg=dict(by_epoch=True, max_epochs=epochs),
        optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=0.1)),
        param_scheduler=schedulers,
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=1, save_best='a/score', rule='greater')),
        custom_hooks=[dict(type='EMAHook')],
        experiment_name=f'{folder.name} {epochs}',
        resume=resume,
        log_level='ERROR',
    )
    runner.train()
    return runner


def test_a_run_of_mmengines_is_resumed(tmp_path: Path) -> None:
    before = run(tmp_path, 1)
    after = run(tmp_path, 2, resume=True)
    history = after.message_hub.get_scalar('train/loss').data[0]
    assert after.iter == 4 and len(history) == 4
    assert history[:2].tolist() == before.message_hub.get_scalar('train/loss').data[0].tolist()
    assert after.message_hub.get_info('best_score') == 0.5
    assert after.optim_wrapper.optimizer.state_dict()['state'][0]['step'] == 4
    assert [scheduler._global_step for scheduler in after.param_schedulers] == [4, 2, 4]


def test_older_histories_that_name_their_statistics_come_back(tmp_path: Path) -> None:
    history = HistoryBuffer([1.0, 3.0], [1, 1])
    vars(history)['_statistics_methods'] = dict(mean=HistoryBuffer.mean)
    torch.save(history, tmp_path / 'a.pth')
    loaded = CheckpointLoader.load_checkpoint(str(tmp_path / 'a.pth'))
    assert type(loaded) is HistoryBuffer and loaded.statistics('mean') == 2.0


@pytest.mark.parametrize('share', [0.2, 0.9])
def test_a_file_cut_short_is_named(share: float, tmp_path: Path) -> None:
    torch.save(dict(state_dict=dict(weight=torch.ones(1000))), tmp_path / 'whole.pth')
    content = (tmp_path / 'whole.pth').read_bytes()
    (tmp_path / 'cut.pth').write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ConfigError, match=r'checkpoint .*cut.pth cannot be read .* cut short'):
        CheckpointLoader.load_checkpoint(str(tmp_path / 'cut.pth'))
