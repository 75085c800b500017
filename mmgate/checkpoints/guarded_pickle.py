"""Read checkpoint files of torch with an unpickler that runs no code and needs no more memory than the file.

A pickle may call any function by its name, change existing objects, and declare tensors of any size. torch's safe
loader takes a list of allowed names only since 2.4, and some of its versions trust the declared sizes.
"""

from __future__ import annotations

import os
import pickle
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from math import prod
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .allowed import ForbiddenContent, find_allowed, refuse
from .safetensors_file import read_safetensors

# Bytes by which the content of a file may exceed its size; torch does not compress.
SLACK = 64 << 20
# The unpickler in C has no methods for instructions that could be overridden.
_PythonUnpickler: Any = pickle._Unpickler


class _Unread:
    """Placeholder for an object in a checkpoint that is left out; pickle may call it, fill it and set its state."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = add = __init__

    def __call__(self, *_: object, **__: object) -> _Unread:
        return self


class GuardedUnpickler(_PythonUnpickler):
    """Unpickler that builds only tensors that fit into the file, and objects of listed classes; it runs no code.

    It changes only objects that it has made.

    Attributes:
        tensors_alone: True leaves other objects than tensors empty.
        sizes: Bytes of a zip's members, by their names below its folder; None for a file that is no zip.
        total: Bytes of the file.
    """

    dispatch = dict(_PythonUnpickler.dispatch)
    tensors_alone: bool
    sizes: dict[str, int] | None
    total: int

    def find_class(self, module: str, name: str) -> Any:
        """Return the class or function that a name in the file may mean; no unknown module is imported."""
        if module == 'torch' and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        return _Unread if self.tensors_alone else find_allowed(module, name)

    def load_build(self) -> None:
        """Set the state of an object that the file describes; raise an error if it is a class, function or module."""
        state = self.stack[-1]
        found = self.stack[-2]
        if isinstance(found, (type, FunctionType, BuiltinFunctionType, ModuleType)):
            refuse(f'changes {found!r}')
        # The state of a dtype holds flags and addresses of numpy. It is dropped, because the name is enough.
        if isinstance(found, np.dtype):
            if not isinstance(state, tuple) or state[1:2] not in (('<',), ('|',), ('=',)):
                refuse('holds numbers of another byte order')
            self.stack.pop()
        else:
            super().load_build()

    def load_binpersid(self) -> None:
        """Refer to a tensor's storage in the file, after a check that the file has as many bytes as it declares."""
        reference = self.stack[-1]
        if isinstance(reference, tuple) and reference[:1] in (('module',), (b'module',)):
            refuse('brings the source of a module')
        _, kind, key, _, count = reference[:5]
        declared = int(count) * torch._utils._element_size(kind.dtype)
        self._declared[key] = declared
        if self.sizes is None:
            there = self.total
            wanted = sum(self._declared.values())
        else:
            there = self.sizes.get(f'data/{key}', 0)
            wanted = declared
        if declared < 0 or wanted > there:
            refuse(f'declares {declared:,} bytes where it has {there:,}')
        super().load_binpersid()

    def load(self) -> Any:
        """Read one pickled object and return it."""
        self._declared: dict[object, int] = {}
        self._copied = 0
        return super().load()

    def load_reduce(self) -> None:
        """Call a function as the file asks; :meth:`find_class` has made sure that it is a listed one."""
        self._count(self.stack[-1])
        super().load_reduce()

    def _instantiate(self, kind: Callable[..., Any], arguments: Iterable[object]) -> None:
        self._count(arguments)
        super()._instantiate(kind, arguments)

    def _count(self, arguments: Iterable[object]) -> None:
        """Raise an error if the file copies lists and dicts so often that they get more elements than it has bytes."""
        self._copied += sum(len(one) for one in arguments if isinstance(one, (dict, list, set, tuple)))
        if self._copied > self.total:
            refuse('makes more copies of its lists than it has bytes')

    def load_bytearray8(self) -> None:
        """Raise an error for a bytearray, which Python would allocate before it reads the content."""
        refuse('holds a bytearray')

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.BINPERSID[0]] = load_binpersid
    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8


def load_file(path: str, map_location: Any, *, trusted: bool, tensors_alone: bool) -> Any:
    """Load a file written by ``torch.save``, or a ``.safetensors`` file, without running code in it.

    Args:
        path: File.
        map_location: Argument of :func:`torch.load`; tensors of a ``.safetensors`` file are on the CPU.
        trusted: True reads the file with pickle's unpickler, which runs code of the file.
        tensors_alone: True leaves objects other than tensors, numbers, strings and plain containers empty.

    Raises:
        ForbiddenContent: It uses a name that is on no list, is a TorchScript archive or a zip bomb, or declares
            tensors that it does not hold.
        ValueError: It cannot be read; the message is the reason.
    """
    if path.endswith('.safetensors'):
        return dict(state_dict=read_safetensors(path)[0], meta={})
    options: dict[str, Any] = {}
    if not trusted:
        limits = dict(sizes=_checked_members(path), total=os.path.getsize(path), tensors_alone=tensors_alone)
        limited: Any = type('LimitedUnpickler', (GuardedUnpickler,), limits)
        # torch.load uses these attributes of a pickle module.
        options['pickle_module'] = SimpleNamespace(
            __name__=__name__, Unpickler=limited, load=lambda file, **kwargs: limited(file, **kwargs).load()
        )
    try:
        return torch.load(path, map_location=map_location, weights_only=False, **options)
    except (ForbiddenContent, MemoryError, torch.cuda.OutOfMemoryError):
        raise
    # torch and pickle raise many kinds of errors.
    except Exception as error:
        lines = str(error).splitlines()
        raise ValueError(lines[0] if lines else type(error).__name__) from error


def _checked_members(path: str) -> dict[str, int] | None:
    """Return the sizes of a zip file's members, None for torch's old format; raise for TorchScript and zip bombs."""
    with open(path, 'rb') as file:
        head = file.read(2)
    if head != b'PK':
        # torch would unpack a tar file.
        if head[:1] != b'\x80' or tarfile.is_tarfile(path):
            raise ValueError(f'no checkpoint of torch; it starts with {head!r}')
        return None
    # The file is cut short, and torch raises an error.
    if not zipfile.is_zipfile(path):
        return {}
    with zipfile.ZipFile(path) as archive:
        sizes = {member.filename.partition('/')[2]: member.file_size for member in archive.infolist()}
        inside = sum(member.file_size for member in archive.infolist())
    outside = os.path.getsize(path)
    if 'constants.pkl' in sizes:
        refuse('is a TorchScript archive, which is code')
    if inside > outside + SLACK:
        refuse(f'has {outside:,} bytes and unpacks into {inside:,}')
    return sizes


def _within_storage(rebuild: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap torch's function that makes a tensor from a storage, so that a tensor beyond the storage is an error."""

    def checked(storage: Any, offset: int, size: Sequence[int], stride: Sequence[int], *rest: object) -> Tensor:
        width = torch._utils._element_size(storage.dtype)
        there = storage._untyped_storage.nbytes()
        last = offset + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
        # A stride of 0 repeats values, and the first copy of the tensor would allocate them all.
        if prod(size) and ((last + 1) * width > there or prod(size) * width > there + SLACK):
            refuse(f'declares a tensor of shape {tuple(size)} in a storage of {there:,} bytes')
        return rebuild(storage, offset, size, stride, *rest)

    return checked


_REBUILT = {name: _within_storage(getattr(torch._utils, name)) for name in ('_rebuild_tensor', '_rebuild_tensor_v2')}


class _Kind:
    """Safe replacement for the class torch.Tensor, which would allocate memory of any size if it were called."""


def _without_attributes(
    rebuild: Callable[..., Tensor], kind: object, arguments: Iterable[Any], state: object
) -> Tensor:
    """Make a tensor without the attributes that FSDP adds; a safe replacement for torch's function."""
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
