"""What no loader of ours takes: the one of the tools and the one of the backbones and the converter."""

from __future__ import annotations

import pickle
import struct
import tarfile
import zipfile
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

LOADERS = pytest.mark.parametrize('load', [load_checkpoint_file, read_checkpoint], ids=['tools', 'backbones'])
HUGE = 1 << 40


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
        Declared(4, (HUGE,), (0,)),
    ],
    ids=['storage', 'shape', 'offset', 'stride', 'repeated'],
)
def test_nothing_larger_than_the_file(
    declared: Declared, write: Callable[..., None], load: Callable[[str], Any], tmp_path: Path
) -> None:
    write(tmp_path / 'a.pth', dict(state_dict=dict(weight=declared)))
    with pytest.raises(ValueError, match=r'declares .* where it has|declares a tensor of shape'):
        load(str(tmp_path / 'a.pth'))


NUMBERS = b']q\x00(' + b'K\x01' * 1000 + b'e'
COPIES = [(NUMBERS if number == 0 else b'h\x00') for number in range(100)]
PICKLES = {
    'copies': (
        b'\x80\x02](' + b''.join(b'cbuiltins\nlist\n' + numbers + b'\x85R' for numbers in COPIES) + b'e.',
        'more copies of its lists',
    ),
    'instances': (
        b'\x80\x02](' + b''.join(b'(cbuiltins\nlist\n' + numbers + b'o' for numbers in COPIES) + b'e.',
        'more copies of its lists',
    ),
    'bytearray': (b'\x80\x05\x96' + struct.pack('<Q', 1 << 36) + b'.', 'holds a bytearray'),
    'class': (b'\x80\x02ccollections\nOrderedDict\n}X\x06\x00\x00\x00markedK\x01sb.', 'changes <class'),
    'function': (b'\x80\x02ctorch._utils\n_rebuild_parameter\n}X\x06\x00\x00\x00markedK\x01sb.', 'changes <function'),
    'tensors': (b'\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x06\x00\x00\x00markedK\x01sb.', 'changes <function'),
    'kind': (
        b'\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(ctorch\nSize\nctorch\nTensor\n)}tR.',
        'asks for a tensor of',
    ),
    'source': (b'\x80\x02(X\x06\x00\x00\x00moduleNNNtQ.', 'brings the source of a module'),
}


@LOADERS
@pytest.mark.parametrize('case', PICKLES)
def test_instructions_that_are_refused(case: str, load: Callable[[str], Any], tmp_path: Path) -> None:
    pickled, message = PICKLES[case]
    zipped(tmp_path / 'a.pth', None, pickled)
    with pytest.raises(ValueError, match=message):
        load(str(tmp_path / 'a.pth'))
    assert not hasattr(OrderedDict, 'marked') and not hasattr(torch._utils._rebuild_parameter, 'marked')


def script(path: Path) -> None:
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), str(path))


def tar(path: Path) -> None:
    """Write torch's oldest format, with a name that begins as a pickle does."""
    with tarfile.open(path, 'w', format=tarfile.GNU_FORMAT, encoding='latin-1') as file:
        file.add(__file__, '\x80tensors')


def bomb(path: Path) -> None:
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as file:
        file.writestr('archive/data.pkl', b'\0' * (100 << 20))


def raw(path: Path) -> None:
    path.write_bytes(pickle.dumps(dict(state_dict={})))


@LOADERS
@pytest.mark.parametrize(
    'write, message',
    [
        (script, 'TorchScript'),
        (tar, 'no checkpoint of torch'),
        (bomb, 'unpacks into 104,857,600'),
        (raw, 'cannot be read'),
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
