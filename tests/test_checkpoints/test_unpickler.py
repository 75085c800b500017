"""What no loader of ours takes: the one of the tools and the one of the backbones and the converter."""

from __future__ import annotations

import pickle
import tarfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.pickles import Declared, legacy, zipped
from torch import nn

from mmgate.checkpoints.loading import load_checkpoint_file
from mmgate.checkpoints.tensors import read_checkpoint
from mmgate.checkpoints.unpickler import torchs_own_is_safe
from mmgate.errors import ConfigError

LOADERS = pytest.mark.parametrize('load', [load_checkpoint_file, read_checkpoint], ids=['tools', 'backbones'])
HUGE = 1 << 40


@pytest.fixture(autouse=True, params=['ours', "torch's"])
def unpickler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Read by our unpickler, as with an older torch, and by torch's own safe loader where that is safe."""
    if request.param == 'ours':
        monkeypatch.setattr('mmgate.checkpoints.unpickler.torchs_own_is_safe', lambda: False)
    elif not torchs_own_is_safe():
        pytest.skip("torch's own loader is not used here")
    return request.param


@LOADERS
@pytest.mark.parametrize('write', [zipped, legacy])
def test_a_tensor_that_fits_is_loaded(write: Callable[..., None], load: Callable[[str], Any], tmp_path: Path) -> None:
    write(tmp_path / 'a.pth', dict(weight=Declared(4, (2, 2), (2, 1)), row=Declared(4, (3,), (0,), 3)))
    found = load(str(tmp_path / 'a.pth'))
    assert found['weight'].shape == (2, 2) and found['row'].shape == (3,)


@LOADERS
def test_a_tensor_with_attributes_is_loaded(load: Callable[[str], Any], tmp_path: Path) -> None:
    """FSDP's optimizer states are some."""
    tensor = torch.arange(3.0)
    tensor.note = 'of FSDP'  # type: ignore[attr-defined]
    torch.save(dict(weight=tensor), tmp_path / 'a.pth')
    assert torch.equal(load(str(tmp_path / 'a.pth'))['weight'], tensor)


@LOADERS
@pytest.mark.parametrize('write', [zipped, legacy])
@pytest.mark.parametrize(
    'declared',
    [
        Declared(HUGE, (HUGE,)),
        Declared(4, (HUGE,)),
        Declared(4, (4,), offset=1),
        Declared(4, (2, 2), (4, 1)),
        Declared(4, (2, 2), (-4, 1)),
        Declared(4, (2,), offset=-2),
    ],
    ids=['storage', 'shape', 'offset', 'stride', 'backwards', 'before'],
)
def test_no_tensor_lies_beyond_its_memory(
    declared: Declared, write: Callable[..., None], load: Callable[[str], Any], tmp_path: Path
) -> None:
    write(tmp_path / 'a.pth', dict(state_dict=dict(weight=declared)))
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
}


@LOADERS
@pytest.mark.parametrize('case', PICKLES)
def test_instructions_that_are_refused(case: str, load: Callable[[str], Any], tmp_path: Path) -> None:
    """Or left empty, where tensors alone are read."""
    zipped(tmp_path / 'a.pth', None, PICKLES[case])
    left_out = load is read_checkpoint and 'address' in case
    with nullcontext() if left_out else pytest.raises(ConfigError):
        assert type(load(str(tmp_path / 'a.pth'))).__name__ == '_Unread'
    assert not hasattr(OrderedDict, 'marked') and not hasattr(torch._utils._rebuild_parameter, 'marked')


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


@LOADERS
@pytest.mark.parametrize('write', [zipped, legacy])
def test_no_module_is_imported(
    write: Callable[..., None], load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / 'evil_module.py').write_text(f'open({str(tmp_path / "code_ran")!r}, "w")\nclass Config: pass\n')
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path / 'a.pth', None, b'\x80\x02cevil_module\nConfig\n)R.')
    refused = pytest.raises(ValueError, match=r'asks for evil_module.Config')
    with refused if load is load_checkpoint_file else nullcontext():  # else it is left empty
        load(str(tmp_path / 'a.pth'))
    assert not (tmp_path / 'code_ran').exists()
