"""torch's checkpoint files, read by an unpickler that runs nothing and holds no more than the file does.

A pickle may call any function by its name, change what it finds, and declare tensors of any size. torch's own safe
loader takes a list of allowed names only since 2.4, and some of its versions believe the declared sizes.
"""

from __future__ import annotations

import os
import pickle
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from math import prod
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .allowed import UnsafeCheckpoint, listed, refuse
from .safetensors_file import read_safetensors

SLACK = 64 << 20  # bytes that a file may hold more inside than outside: torch does not compress
_PythonUnpickler: Any = pickle._Unpickler  # the one in C has no instructions that could be refused


class _Unread:
    """In the place of an object that is left out; it takes what pickle gives it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = add = __init__

    def __call__(self, *_: Any, **__: Any) -> _Unread:
        return self


class GuardedUnpickler(_PythonUnpickler):
    """Makes tensors that fit into the file and what is listed, and changes nothing but fresh objects.

    Attributes:
        tensors_alone: Whether objects of other kinds are left empty.
        sizes: Bytes of a zip's members, by their names below its folder; None for a file that is no zip.
        total: Bytes of the file.
    """

    dispatch = dict(_PythonUnpickler.dispatch)
    tensors_alone: bool
    sizes: dict[str, int] | None
    total: int

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name, without importing a module that is not known."""
        if module == 'torch' and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        return _Unread if self.tensors_alone else listed(module, name)

    def load_build(self) -> None:
        """Change an object, which must not be one that was there; a type of numpy's is what its name says."""
        state, found = self.stack[-1], self.stack[-2]
        if isinstance(found, (type, FunctionType, BuiltinFunctionType, ModuleType)):
            refuse(f'changes {found!r}')
        if isinstance(found, np.dtype):  # its state holds flags and addresses of numpy's; the name has said all
            if not isinstance(state, tuple) or state[1:2] not in (('<',), ('|',), ('=',)):
                refuse('holds numbers of another byte order')
            self.stack.pop()
        else:
            super().load_build()

    def load_binpersid(self) -> None:
        """Refer to a storage of the file; torch believes the size that is declared here."""
        reference = self.stack[-1]
        if isinstance(reference, tuple) and reference[:1] in (('module',), (b'module',)):
            refuse('brings the source of a module')
        _, kind, key, _, count = reference[:5]
        declared = int(count) * torch._utils._element_size(kind.dtype)
        self._declared[key] = declared
        there = self.total if self.sizes is None else self.sizes.get(f'data/{key}', 0)
        if declared < 0 or (sum(self._declared.values()) if self.sizes is None else declared) > there:
            refuse(f'declares {declared:,} bytes where it has {there:,}')
        super().load_binpersid()

    def load(self) -> Any:
        """Read one pickle."""
        self._declared: dict[Any, int] = {}
        self._copied = 0
        return super().load()

    def load_reduce(self) -> None:
        """Call what is on the list."""
        self._count(self.stack[-1])
        super().load_reduce()

    def _instantiate(self, kind: Any, arguments: Any) -> None:
        self._count(arguments)
        super()._instantiate(kind, arguments)

    def _count(self, arguments: Any) -> None:
        """Refuse more copies of lists and dicts than a file of this size can have written down."""
        self._copied += sum(len(one) for one in arguments if isinstance(one, (dict, list, set, tuple)))
        if self._copied > self.total:
            refuse('makes more copies of its lists than it has bytes')

    def load_bytearray8(self) -> None:
        """Refuse what Python fills with zeros before it reads."""
        refuse('holds a bytearray')

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.BINPERSID[0]] = load_binpersid
    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8


def load_file(path: str, map_location: Any, *, trusted: bool, tensors_alone: bool) -> Any:
    """Return what a file of ``torch.save`` holds, or a ``.safetensors`` file.

    Args:
        path: File.
        map_location: As :func:`torch.load` takes it; what a ``.safetensors`` file holds comes on the CPU.
        trusted: Whether pickle's own unpickler reads it, which runs what the file asks for.
        tensors_alone: Whether objects beside tensors, numbers, strings and plain containers are left empty.

    Raises:
        UnsafeCheckpoint: It asks for what is on no list, is a TorchScript archive or a zip bomb, or declares
            tensors that it does not hold.
        ValueError: It cannot be read; the message is the reason.
    """
    if path.endswith('.safetensors'):
        return dict(state_dict=read_safetensors(path)[0], meta={})
    options: dict[str, Any] = {}
    if not trusted:
        limits = dict(sizes=_checked_members(path), total=os.path.getsize(path), tensors_alone=tensors_alone)
        limited: Any = type('LimitedUnpickler', (GuardedUnpickler,), limits)
        # what torch.load asks of a pickle module
        options['pickle_module'] = SimpleNamespace(
            __name__=__name__, Unpickler=limited, load=lambda file, **kwargs: limited(file, **kwargs).load()
        )
    try:
        return torch.load(path, map_location=map_location, weights_only=False, **options)
    except (UnsafeCheckpoint, MemoryError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:  # torch and pickle raise a dozen kinds
        raise ValueError((str(error).splitlines() or [type(error).__name__])[0]) from error


def _checked_members(path: str) -> dict[str, int] | None:
    """Return the sizes of a zip's members, None for torch's old format; refuse what would get past the unpickler."""
    with open(path, 'rb') as file:
        head = file.read(2)
    if head != b'PK':
        if head[:1] != b'\x80' or tarfile.is_tarfile(path):  # torch unpacks those
            raise ValueError(f'no checkpoint of torch; it starts with {head!r}')
        return None
    if not zipfile.is_zipfile(path):  # cut short: torch says so
        return {}
    with zipfile.ZipFile(path) as archive:
        sizes = {member.filename.partition('/')[2]: member.file_size for member in archive.infolist()}
        inside, outside = sum(member.file_size for member in archive.infolist()), os.path.getsize(path)
    if 'constants.pkl' in sizes:
        refuse('is a TorchScript archive, which is code')
    if inside > outside + SLACK:
        refuse(f'has {outside:,} bytes and unpacks into {inside:,}')
    return sizes


def _within_storage(rebuild: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of torch's that makes a tensor of a storage, refusing one that reaches beyond."""

    def checked(storage: Any, offset: int, size: Any, stride: Any, *rest: Any) -> Tensor:
        width, there = torch._utils._element_size(storage.dtype), storage._untyped_storage.nbytes()
        last = offset + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
        # a stride of 0 repeats what is there, which the first copy would write out
        if prod(size) and ((last + 1) * width > there or prod(size) * width > there + SLACK):
            refuse(f'declares a tensor of shape {tuple(size)} in a storage of {there:,} bytes')
        return rebuild(storage, offset, size, stride, *rest)

    return checked


_REBUILT = {name: _within_storage(getattr(torch._utils, name)) for name in ('_rebuild_tensor', '_rebuild_tensor_v2')}


class _Kind:
    """In the place of torch.Tensor, which would make memory of any size."""


def _without_attributes(rebuild: Callable[..., Tensor], kind: Any, arguments: Any, state: Any) -> Tensor:
    """Stand for torch's function that makes a tensor with attributes, as FSDP leaves some; loading needs none."""
    if rebuild not in _REBUILT.values() or kind is not _Kind:
        refuse(f'asks for a tensor of kind {kind!r} by {rebuild!r}')
    return rebuild(*arguments)


_KNOWN: dict[tuple[str, str], Any] = {
    ('collections', 'OrderedDict'): OrderedDict,
    ('torch', 'Size'): torch.Size,
    ('torch', 'Tensor'): _Kind,
    ('torch', 'device'): torch.device,
    ('torch._tensor', '_rebuild_from_type_v2'): _without_attributes,
    ('torch._utils', '_rebuild_parameter'): torch._utils._rebuild_parameter,
    **{('torch._utils', name): rebuild for name, rebuild in _REBUILT.items()},
}
