"""Strangers' checkpoints by our loaders: what mmengine saves loads, what would run code does not."""

from __future__ import annotations

import codecs
import os
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pickles import zipped
from mmengine.config import ConfigDict
from mmengine.logging import HistoryBuffer, MessageHub
from mmengine.optim.scheduler.param_scheduler import OneCycleParamScheduler
from mmengine.registry import PARAM_SCHEDULERS
from mmengine.runner.checkpoint import CheckpointLoader
from torch import nn

import mmgate  # noqa: F401
from mmgate.checkpoints.loading import TRUST, UntrustedCheckpoint, guarded_loaders
from mmgate.checkpoints.tensors import read_checkpoint
from mmgate.errors import ConfigError


@pytest.fixture(autouse=True)
def guarded() -> Iterator[None]:
    """Load by our loaders, as in our command lines."""
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
    'doubled': lambda tmp: Calls(codecs.encode, b'ab', 'hex'),
    'encoding': lambda tmp: Calls(codecs.encode, 'ab', 'hex'),
    'history': lambda tmp: Calls(HistoryBuffer, [[1], [2]], [1, 1]),
    'text': lambda tmp: Calls(str, [[1], [2]]),  # of nested lists it doubles with each
    'private': lambda tmp: Calls(getattr, HistoryBuffer, '__init__'),
    'statistics': lambda tmp: Calls(getattr, HistoryBuffer, 'register_statistics'),
    'scheduler': lambda tmp: Calls(getattr, OneCycleParamScheduler, 'state_dict'),
    'byte_order': lambda tmp: np.zeros(1, '>f4'),
    'objects': lambda tmp: np.zeros(1, 'object'),
    'structures': lambda tmp: np.zeros(1, [('a', 'i4')]),
    'scalar_type': lambda tmp: Calls(np.float32(0).__reduce__()[0], 'f4', bytes(4)),
    'scalar_content': lambda tmp: Calls(np.float32(0).__reduce__()[0], np.dtype('f4'), 'text'),
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
@pytest.mark.parametrize(
    'text, runs',
    [
        ("model = dict(type='X', a=[1, -2.5, None], b=float('inf'))\nlr = 1e-3\nx = dict(y=lr)", False),
        ("__import__('os').system('true')", True),
        ('import os', True),
        ('x = ().__class__.__base__', True),
        ("dict = eval\nx = dict('1')", True),
        ('not python (', False),
        ('x = {{\'$NO_SUCH:1|__import__("os").system("true")#\'}}', True),
        ("_base_ = '/tmp/x.py'", True),
        ('x = 9**9**9', True),
        ("model = dict(type='subprocess.check_call', args=['true'])", True),
        ("model = dict(backbone={'type': 'mmengine.utils.package_utils.call_command', 'cmd': ['true']})", True),
        ("model = dict(type='mmengine.hub.os.system')", True),
        ("keys = dict({'backbone.a': dict(lr_mult=0.1)})", False),  # as mmengine writes keys with dots
        ("model = dict({'type': 'subprocess.check_call'})", True),
        ("model = dict([('type', 'subprocess.check_call')])", True),
        ("model = {**{'type': 'subprocess.check_call'}}", True),
        ("model = dict(**{'a': 1})", True),
        ("name = 'subprocess.check_call'\nmodel = dict(type=name)", True),
        ("key = 'type'\nmodel = {key: 'subprocess.check_call'}", True),
        (
            "model = dict(type='mmgate.Gated', host='mmdet.models.detectors.DETR', o=dict(type='torch.optim.AdamW'))",
            False,
        ),
        ("loader = dict(collate_fn=dict(type='mmengine.dataset.pseudo_collate'))", False),
    ],
    ids=lambda value: None if isinstance(value, bool) else value.split('(')[0][:20],
)
def test_a_config_may_only_hold_values(text: str, runs: bool, place: str, tmp_path: Path) -> None:
    """mmengine runs it as Python where it resumes, and in its inferencers."""
    content: Any = text
    for key in reversed(place.split('.')):
        content = {key: content}
    torch.save(content, tmp_path / 'a.pth')
    if runs:
        with pytest.raises(UntrustedCheckpoint, match='holds a config'):
            CheckpointLoader.load_checkpoint(str(tmp_path / 'a.pth'))
    else:
        CheckpointLoader.load_checkpoint(str(tmp_path / 'a.pth'))


@pytest.mark.parametrize(
    'data',
    [
        b'cnumpy\nndarray\nJ\x00\xe1\xf5\x05\x85\x85R',
        b'(cmmengine.logging.history_buffer\nHistoryBuffer\n]]o',
        b'(]]immengine.logging.history_buffer\nHistoryBuffer\n',
        b'ctorch\nUntypedStorage\nK\x08\x85}\x8c\tallocatorJAAAAs\x92',
        b'ctorch.storage\nUntypedStorage\nK\x08\x85}\x8c\tallocatorJAAAAs\x92',
    ],
    ids=['list', 'obj', 'inst', 'storage at an address', 'the same'],
)
def test_a_small_file_makes_nothing_large(data: bytes, tmp_path: Path) -> None:
    zipped(tmp_path / 'a.pth', None, b'\x80\x04' + data + b'.')
    with pytest.raises(ConfigError):
        CheckpointLoader.load_checkpoint(str(tmp_path / 'a.pth'))


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


@pytest.mark.parametrize('protocol', [2, 4])
def test_what_mmengine_saves_comes_back(protocol: int, tmp_path: Path) -> None:
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
        others=[defaultdict(list, a=[1]), ConfigDict(a=dict(b=1)), torch.float16, np.array(['x']), {1}, 1j],
        device=torch.device('cpu'),
        empty=np.zeros((0, 4)),
    )
    torch.save(saved, tmp_path / 'epoch_3.pth', pickle_protocol=protocol)
    loaded = CheckpointLoader.load_checkpoint(str(tmp_path / 'epoch_3.pth'), map_location='cpu')
    fresh = MessageHub('test_safe_load_fresh')
    fresh.load_state_dict(loaded['message_hub'])
    assert fresh.get_scalar('train/loss').mean() == 2.0 and fresh.get_scalar('train/loss').max() == 3.0
    assert fresh.get_info('best') == 0.25
    others = loaded['others']
    assert loaded['empty'].shape == (0, 4) and others[1].a.b == 1 and others[2:4] == [torch.float16, ['x']]
    np.testing.assert_array_equal(loaded['meta']['dataset_meta']['palette'], np.arange(6).reshape(2, 3))
    optimizer.load_state_dict(loaded['optimizer'])
    assert all(torch.equal(loaded['state_dict'][key], value) for key, value in saved['state_dict'].items())


def test_a_history_does_not_change_mmengines(tmp_path: Path) -> None:
    history = HistoryBuffer([1.0, 3.0], [1, 1])
    vars(history)['_statistics_methods'] = dict(mean=HistoryBuffer.max)
    torch.save(history, tmp_path / 'a.pth')
    loaded = CheckpointLoader.load_checkpoint(str(tmp_path / 'a.pth'))
    assert type(loaded) is HistoryBuffer and loaded.statistics('mean') == HistoryBuffer([2.0], [1]).mean()


@pytest.mark.parametrize('share', [0.2, 0.9])
def test_a_file_cut_short_is_named(share: float, tmp_path: Path) -> None:
    torch.save(dict(state_dict=dict(weight=torch.ones(1000))), tmp_path / 'whole.pth')
    content = (tmp_path / 'whole.pth').read_bytes()
    (tmp_path / 'cut.pth').write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ConfigError, match=r'checkpoint .*cut.pth cannot be read .* cut short'):
        CheckpointLoader.load_checkpoint(str(tmp_path / 'cut.pth'))
