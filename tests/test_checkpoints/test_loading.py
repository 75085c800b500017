"""Strangers' checkpoints: what mmengine saves loads, what would run code or read foreign memory does not."""

from __future__ import annotations

import os
import pickle
import struct
import tarfile
import zipfile
from argparse import ArgumentParser, Namespace
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.small_demo import run, write_demo
from mmengine.config import ConfigDict
from mmengine.logging import HistoryBuffer
from mmengine.optim.scheduler.param_scheduler import OneCycleParamScheduler
from mmengine.runner.checkpoint import CheckpointLoader
from torch import nn
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION

import mmgate  # noqa: F401
from mmgate.checkpoints.gates_file import read_gates
from mmgate.checkpoints.loading import UntrustedCheckpoint, guarded_loaders, load_checkpoint_file
from mmgate.checkpoints.tensors import read_checkpoint
from mmgate.checkpoints.unpickler import torchs_own_is_safe
from mmgate.errors import TRUST, ConfigError
from mmgate.mm import cli
from mmgate.mm.config_file import add_trust_option
from mmgate.mm.gates_hook import GatesCheckpointHook

LOADERS = pytest.mark.parametrize('load', [load_checkpoint_file, read_checkpoint], ids=['tools', 'backbones'])
HUGE = 1 << 40


@pytest.fixture(autouse=True, params=['ours', "torch's"])
def guarded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Load as in our command lines, by our unpickler and by torch's own safe loader where that is safe."""
    if request.param == 'ours':
        monkeypatch.setattr('mmgate.checkpoints.unpickler.torchs_own_is_safe', lambda: False)
    elif not torchs_own_is_safe():
        pytest.skip("torch's own loader is not used here")
    with guarded_loaders():
        yield


class Storage:
    """Stands for a storage of so many float32 numbers."""

    def __init__(self, numbers: int) -> None:
        self.numbers = numbers


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function: Callable, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def declared(storage: int, shape: tuple[int, ...], stride: tuple[int, ...] = (1,), offset: int = 0) -> Calls:
    """Return what pickles as a tensor of any shape in a storage of any size."""
    rebuild = torch._utils._rebuild_tensor_v2
    return Calls(rebuild, Storage(storage), offset, shape, stride, False, OrderedDict())


class Pickler(pickle.Pickler):
    def __init__(self, file: Any, *view: None) -> None:
        super().__init__(file, 2)
        self.view = view

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, Storage):
            return 'storage', torch.FloatStorage, '0', 'cpu', obj.numbers, *self.view
        return None


def zipped(path: Path, content: Any, pickled: bytes | None = None) -> None:
    """Write a checkpoint whose one storage holds 4 numbers."""
    torch.save(dict(weight=torch.ones(4)), path)
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, 'w') as file:
        for name, data in members.items():
            if name.endswith('data.pkl'):
                with file.open(name, 'w') as member:
                    member.write(pickled) if pickled else Pickler(member).dump(content)
            else:
                file.writestr(name, data)


def legacy(path: Path, content: Any, pickled: bytes | None = None) -> None:
    with path.open('wb') as file:
        for part in (MAGIC_NUMBER, PROTOCOL_VERSION, dict(little_endian=True)):
            pickle.dump(part, file, 2)
        file.write(pickled) if pickled else Pickler(file, None).dump(content)
        pickle.dump([] if pickled else ['0'], file, 2)
        file.write(struct.pack('<q', 4) + bytes(16))


FORMATS = pytest.mark.parametrize('write', [zipped, legacy])


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


PLACES: dict[str, Callable[[Any], Any]] = {
    'top': lambda evil: evil,
    'meta': lambda evil: dict(meta=dict(deep=[(evil,)]), state_dict={}),
    'state_dict': lambda evil: dict(state_dict=dict(weight=evil)),
    'list': lambda evil: [(evil, 1)],
}


@pytest.mark.parametrize('attack, place', [*((name, 'meta') for name in ATTACKS), *(('system', x) for x in PLACES)])
@pytest.mark.parametrize('old', [False, True], ids=['zip', 'legacy'])
def test_code_does_not_run(attack: str, place: str, old: bool, tmp_path: Path) -> None:
    content = PLACES[place](ATTACKS[attack](tmp_path))
    torch.save(content, tmp_path / 'evil.pth', _use_new_zipfile_serialization=not old)
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
        content = OrderedDict({key: content})
        content.get = bool  # which hides what it holds
    content['state_dict'] = dict(weight=torch.ones(1))
    torch.save(content, tmp_path / 'a.pth')
    loaded = CheckpointLoader.load_checkpoint(str(tmp_path / 'a.pth'))
    assert loaded.pop('state_dict')['weight'] == 1
    for key in place.split('.')[:-1]:
        loaded = loaded[key]
    assert list(loaded) == ([] if runs else [place.rpartition('.')[2]])
    assert [('its config was left out' in line and '__import__' in line) for line in said] == [True] * runs


def test_trust_is_the_users_to_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(dict(meta=Calls(os.mkdir, str(marker(tmp_path)))), tmp_path / 'mine.pth')
    monkeypatch.setenv(TRUST, '')  # restored afterwards
    parser = ArgumentParser()
    add_trust_option(parser)
    parser.parse_args([])
    assert not os.environ[TRUST]
    parser.parse_args(['--trust-checkpoint'])
    read_checkpoint(str(tmp_path / 'mine.pth'))  # for a backbone, tensors alone
    assert not marker(tmp_path).exists()
    CheckpointLoader.load_checkpoint(str(tmp_path / 'mine.pth'))
    assert marker(tmp_path).exists()


def test_what_mmengine_may_save_comes_back(tmp_path: Path) -> None:
    """Beside what a run saves, below: older histories name their statistics, and users leave what they like in meta."""
    history = HistoryBuffer([1.0, 3.0], [1, 1])
    vars(history)['_statistics_methods'] = dict(mean=HistoryBuffer.mean)
    plain = [1j, {1}, Counter([3, 5]), torch.float16, torch.device('cpu'), dict(cfg=Path('/tmp')), np.float32(0.25)]
    saved = dict(
        plain=plain,
        history=history,
        arrays=[np.arange(6).reshape(2, 3), np.zeros((0, 4))],
        made=[defaultdict(list), ConfigDict(a=dict(b=1)), Namespace(folder=Path('/tmp'))],
        state_dict=OrderedDict(half=torch.ones(1, dtype=torch.bfloat16), none=torch.ones(0)),
    )
    torch.save(saved, tmp_path / 'a.pth')
    loaded = CheckpointLoader.load_checkpoint(str(tmp_path / 'a.pth'), map_location='cpu')
    assert loaded['plain'] == plain and loaded['history'].statistics('mean') == 2.0
    for array, expected in zip(loaded['arrays'], saved['arrays'], strict=True):
        np.testing.assert_array_equal(array, expected)
    kept, config, namespace = loaded['made']
    assert kept == {} and config.a.b == 1 and namespace.folder == Path('/tmp')
    assert all(torch.equal(loaded['state_dict'][key], value) for key, value in saved['state_dict'].items())


RUN = """
_base_ = './vanilla.py'
custom_hooks = [dict(type='EMAHook')]
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, end=2),
    dict(type='MultiStepLR', milestones=[1, 2]),
    dict(type='OneCycleLR', eta_max=0.1, total_steps=20, by_epoch=False)]
train_cfg = dict(val_interval=1)
default_hooks = dict(checkpoint=dict(save_best='coco/bbox_mAP', rule='greater'))
"""


def test_a_run_with_all_that_mmengine_may_save_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer, schedulers, averages, a history, the best score."""
    monkeypatch.chdir(write_demo(tmp_path))
    Path('run.py').write_text(RUN)
    for epochs, more in ((1, []), (2, ['--resume'])):
        run(cli.train, 'run.py', '--work-dir', 'work', *more, '--cfg-options', f'train_cfg.max_epochs={epochs}')
    before, after = (torch.load(f'work/epoch_{epoch}.pth', weights_only=False) for epoch in (1, 2))
    first, all_of_it = (one['message_hub']['log_scalars']['train/loss'].data[0].tolist() for one in (before, after))
    assert after['meta']['iter'] == len(all_of_it) == 4 and all_of_it[:2] == first
    assert 'best_score' in after['message_hub']['runtime_info']
    assert after['optimizer']['state'][0]['step'] == 4
    assert [scheduler['_global_step'] for scheduler in after['param_schedulers']] == [4, 2, 4]


@pytest.mark.parametrize('share', [0.2, 0.9])
def test_a_file_cut_short_is_named(share: float, tmp_path: Path) -> None:
    torch.save(dict(state_dict=dict(weight=torch.ones(1000))), tmp_path / 'whole.pth')
    content = (tmp_path / 'whole.pth').read_bytes()
    (tmp_path / 'cut.pth').write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ConfigError, match=r'checkpoint .*cut.pth cannot be read .* cut short'):
        CheckpointLoader.load_checkpoint(str(tmp_path / 'cut.pth'))


@LOADERS
@FORMATS
def test_a_tensor_that_fits_is_loaded(write: Callable[..., None], load: Callable[[str], Any], tmp_path: Path) -> None:
    write(tmp_path / 'a.pth', dict(weight=declared(4, (2, 2), (2, 1)), row=declared(4, (3,), (0,), 3)))
    found = load(str(tmp_path / 'a.pth'))
    assert found['weight'].shape == (2, 2) and found['row'].shape == (3,)
    tensor = torch.arange(3.0)
    tensor.note = 'as in optimizer states of FSDP'  # type: ignore[attr-defined]
    torch.save(dict(weight=tensor), tmp_path / 'b.pth')
    assert torch.equal(load(str(tmp_path / 'b.pth'))['weight'], tensor)


@LOADERS
@FORMATS
@pytest.mark.parametrize(
    'tensor',
    [
        declared(HUGE, (HUGE,)),
        declared(4, (HUGE,)),
        declared(4, (4,), offset=1),
        declared(4, (2, 2), (4, 1)),
        declared(4, (2, 2), (-4, 1)),
        declared(4, (2,), offset=-2),
    ],
    ids=['storage', 'shape', 'offset', 'stride', 'backwards', 'before'],
)
def test_no_tensor_lies_beyond_its_memory(
    tensor: Calls, write: Callable[..., None], load: Callable[[str], Any], tmp_path: Path
) -> None:
    write(tmp_path / 'a.pth', dict(state_dict=dict(weight=tensor)))
    with pytest.raises(ConfigError):
        load(str(tmp_path / 'a.pth'))


STATE = b'}X\x06\x00\x00\x00markedK\x01s'
PICKLES = {
    'class': b'\x80\x02ccollections\nOrderedDict\n' + STATE + b'b.',
    'class by slots': b'\x80\x02ccollections\nOrderedDict\nN' + STATE + b'\x86b.',
    'function': b'\x80\x02ctorch._utils\n_rebuild_parameter\nN' + STATE + b'\x86b.',
    'source': b'\x80\x02(X\x06\x00\x00\x00moduleNNNtQ.',
    'item': b'\x80\x02ctorch\nSize\n)RK\x00K\x01s.',
    'items': b'\x80\x02ctorch\nSize\n)R(K\x00K\x01u.',
    'storage at an address': b'\x80\x04ctorch\nUntypedStorage\nK\x08\x85}\x8c\tallocatorJAAAAs\x92.',
    'another at an address': b'\x80\x04ctorch.storage\nUntypedStorage\nK\x08\x85}\x8c\tallocatorJAAAAs\x92.',
    'array at an address': b'\x80\x02cnumpy\nndarray\nK\x08\x85R.',
    'module': b'\x80\x02cevil_module\nConfig\n)R.',
}


@LOADERS
@FORMATS
@pytest.mark.parametrize('case', PICKLES)
def test_instructions_that_are_refused(
    case: str, write: Callable[..., None], load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or left empty, where tensors alone are read; no module is imported for them."""
    (tmp_path / 'evil_module.py').write_text(f'open({str(marker(tmp_path))!r}, "w")\nclass Config: pass\n')
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path / 'a.pth', None, PICKLES[case])
    left_out = load is read_checkpoint and ('address' in case or case == 'module')
    error = ConfigError if case == 'array at an address' else UntrustedCheckpoint  # its class takes no arguments
    with nullcontext() if left_out else pytest.raises(error):
        assert type(load(str(tmp_path / 'a.pth'))).__name__ == '_Unread'
    assert not hasattr(OrderedDict, 'marked') and not hasattr(torch._utils._rebuild_parameter, 'marked')
    assert not marker(tmp_path).exists()


def script(path: Path) -> None:
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), str(path))


def tar(path: Path) -> None:
    """Write torch's oldest format, with a name that begins as a pickle does."""
    with tarfile.open(path, 'w', format=tarfile.GNU_FORMAT, encoding='latin-1') as file:
        file.add(__file__, '\x80tensors')


def tar_like_a_zip(path: Path) -> None:
    """Write torch's oldest format, with a name that begins as a zip file does, before a zip file."""
    with tarfile.open(path, 'w', format=tarfile.GNU_FORMAT) as file:
        file.add(__file__, 'PKtensors')
    with path.open('ab') as file:
        torch.save({}, file)


def raw(path: Path) -> None:
    path.write_bytes(pickle.dumps(dict(state_dict={})))


@LOADERS
@pytest.mark.parametrize(
    'write, message',
    [
        (script, 'TorchScript'),
        (tar, 'no checkpoint of torch'),
        (tar_like_a_zip, 'no checkpoint of torch'),
        (raw, 'cannot be read|does not read'),
    ],
)
def test_other_formats_are_refused(
    write: Callable[[Path], None], message: str, load: Callable[[str], Any], tmp_path: Path
) -> None:
    write(tmp_path / 'a.pth')
    with pytest.raises(ValueError, match=message):
        load(str(tmp_path / 'a.pth'))


def test_files_of_safetensors_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By mmengine with our loader in it; who lacks safetensors hears of it before a training."""
    file = tmp_path / 'a.safetensors'
    saved = dict(weight=torch.randn(2, 3), half=torch.ones(1, dtype=torch.bfloat16))
    pytest.importorskip('safetensors.torch', reason='no safetensors').save_file(saved, file)
    loaded = CheckpointLoader.load_checkpoint(str(file))
    assert loaded['meta'] == {} and loaded['state_dict'].keys() == saved.keys()
    for name, tensor in saved.items():
        torch.testing.assert_close(loaded['state_dict'][name], tensor, rtol=0, atol=0)
    file.write_bytes(b'nonsense')
    with pytest.raises(ConfigError, match='cannot be read'):
        CheckpointLoader.load_checkpoint(str(file))
    monkeypatch.setattr('mmgate.checkpoints.safetensors_file.why_not', lambda package: f'no module named {package!r}')
    for use in (GatesCheckpointHook, lambda: read_gates(file)):
        with pytest.raises(ConfigError, match=r"^no module named 'safetensors'\. .* pip install safetensors"):
            use()
