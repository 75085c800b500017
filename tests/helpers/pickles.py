"""Write checkpoints whose pickles declare what we like."""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION


class Storage:
    """Stands for a storage of so many float32 numbers."""

    def __init__(self, numbers: int) -> None:
        self.numbers = numbers


class Declared:
    """Pickles as a tensor of any shape in a storage of any size."""

    def __init__(self, storage: int, shape: tuple[int, ...], stride: tuple[int, ...] = (1,), offset: int = 0) -> None:
        self.arguments = Storage(storage), offset, shape, stride, False, OrderedDict()

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor_v2, self.arguments


class Pickler(pickle.Pickler):
    view: tuple[Any, ...] = ()

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, Storage):
            return 'storage', torch.FloatStorage, '0', 'cpu', obj.numbers, *self.view
        return None


class LegacyPickler(Pickler):
    view = (None,)


def zipped(path: Path, content: Any, pickled: bytes | None = None) -> None:
    """Write a checkpoint whose one storage holds 4 numbers."""
    torch.save(dict(weight=torch.ones(4)), path)
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, 'w') as file:
        for name, data in members.items():
            if name.endswith('data.pkl'):
                with file.open(name, 'w') as member:
                    member.write(pickled) if pickled else Pickler(member, 2).dump(content)
            else:
                file.writestr(name, data)


def legacy(path: Path, content: Any, pickled: bytes | None = None) -> None:
    with path.open('wb') as file:
        for part in (MAGIC_NUMBER, PROTOCOL_VERSION, dict(little_endian=True)):
            pickle.dump(part, file, 2)
        file.write(pickled) if pickled else LegacyPickler(file, 2).dump(content)
        pickle.dump([] if pickled else ['0'], file, 2)
        file.write(struct.pack('<q', 4) + bytes(16))
