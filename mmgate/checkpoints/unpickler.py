"""Read checkpoint files of torch with an unpickler that runs no code of the file.

A pickle may call any function by its name. torch's own safe loader does this job from torch 2.10 on. Before it lets a
file write beyond a tensor's memory (CVE-2026-24747), and torch 2.1 to 2.4 cannot be told what mmengine saves beside
tensors: there, and where unknown objects are to be left empty, the unpickler of this module reads.
"""

from __future__ import annotations

import pickle
import re
import tarfile
from _compat_pickle import IMPORT_MAPPING
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import torch

from .allowed import ALLOWED, ForbiddenContent, refuse
from .safetensors_file import read_safetensors

# The unpickler in C has no methods for instructions that could be overridden.
_PythonUnpickler: Any = pickle._Unpickler
_OF_TENSORS: dict[str, Any] = {
    'collections.OrderedDict': OrderedDict,
    'torch.Size': torch.Size,
    'torch.Tensor': torch.Tensor,
    'torch.device': torch.device,
    'torch.nn.parameter.Parameter': torch.nn.Parameter,
    'torch.serialization._get_layout': torch.serialization._get_layout,
    'torch._tensor._rebuild_from_type_v2': torch._tensor._rebuild_from_type_v2,
    **{
        f'torch._utils._rebuild_{name}': getattr(torch._utils, f'_rebuild_{name}')
        for name in ('tensor', 'tensor_v2', 'parameter', 'parameter_with_state', 'sparse_tensor')
    },
}
# Classes of objects whose state a file may set.
_BUILT = {cls for cls in (*_OF_TENSORS.values(), *ALLOWED.values()) if isinstance(cls, type)}


class _Unread:
    """Placeholder for an object in a checkpoint that is left out; pickle may call it, fill it and set its state."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = add = __init__

    def __call__(self, *_: object, **__: object) -> _Unread:
        return self


class _Unpickler(_PythonUnpickler):
    """Unpickler that builds tensors and objects of listed classes, and changes only objects that it has made.

    Attributes:
        tensors_alone: True leaves other objects than tensors empty.
        archive: torch's reader of the file, None for torch's old format, whose sizes torch checks.
        sizes: Bytes of the storages that were looked at.
    """

    dispatch = dict(_PythonUnpickler.dispatch)
    tensors_alone = False
    archive: Any = None
    sizes: dict[str, int]

    def find_class(self, module: str, name: str) -> Any:
        """Return the class or function that a name in the file may mean; no module is imported."""
        # Protocol 2 writes the names of Python 2.
        full = f'{IMPORT_MAPPING.get(module, module)}.{name}'
        if module == 'torch' and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if full in _OF_TENSORS:
            return _OF_TENSORS[full]
        if self.tensors_alone:
            return _Unread
        return ALLOWED[full] if full in ALLOWED else refuse(f'asks for {full}')

    def load_build(self) -> None:
        """Set the state of an object that the file describes, never that of a class or function."""
        if type(self.stack[-2]) not in {*_BUILT, _Unread}:
            refuse(f'changes {self.stack[-2]!r}')
        super().load_build()

    def _refuse_to_fill(self, found: object) -> None:
        if not isinstance(found, (dict, _Unread)):
            refuse(f'sets items of a {type(found).__name__}')

    def load_setitem(self) -> None:
        """Set an item of a dict; an item of a tensor may lie beyond its memory."""
        self._refuse_to_fill(self.stack[-3])
        super().load_setitem()

    def load_setitems(self) -> None:
        """Set items of a dict, as :meth:`load_setitem`."""
        self._refuse_to_fill(self.metastack[-1][-1])
        super().load_setitems()

    def load_binpersid(self) -> None:
        """Refer to a tensor's storage in the file; torch below 2.10 believes its declared size."""
        reference = self.stack[-1]
        if not isinstance(reference, tuple) or reference[:1] not in (('storage',), (b'storage',)):
            refuse('refers to something other than the storage of a tensor')
        _, storage, key, _, count = reference[:5]
        declared = int(count) * torch._utils._element_size(storage.dtype)
        if self.archive is not None:
            # Many tensors may be views of one storage, which is read once for its size.
            if key not in self.sizes:
                self.sizes[key] = len(self.archive.get_record(f'data/{key}'))
            if declared > self.sizes[key]:
                refuse(f'declares {declared:,} bytes where it has {self.sizes[key]:,}')
        super().load_binpersid()

    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.BINPERSID[0]] = load_binpersid


def load_file(path: str, map_location: Any, *, trusted: bool, tensors_alone: bool) -> Any:
    """Load a file written by ``torch.save``, or a ``.safetensors`` file, without running code in it.

    Args:
        path: File.
        map_location: Argument of :func:`torch.load`; tensors of a ``.safetensors`` file are on the CPU.
        trusted: True reads the file with pickle's unpickler, which runs code of the file.
        tensors_alone: True leaves objects other than tensors, numbers, strings and plain containers empty.

    Raises:
        ForbiddenContent: It uses a name that is on no list, or is a TorchScript archive.
        ValueError: It cannot be read; the message is the reason.
    """
    if path.endswith('.safetensors'):
        return dict(state_dict=read_safetensors(path)[0], meta={})
    try:
        if trusted:
            return torch.load(path, map_location=map_location, weights_only=False)
        archive = _archive(path)
        if tensors_alone or not torchs_own_is_safe() or _may_share_arrays(archive):
            return _load_by_ours(path, map_location, tensors_alone, archive)
        with torch.serialization.safe_globals([(cls, name) for name, cls in ALLOWED.items()]):
            return torch.load(path, map_location=map_location, weights_only=True)
    except (ForbiddenContent, MemoryError, torch.cuda.OutOfMemoryError):
        raise
    # torch and pickle raise many kinds of errors.
    except Exception as error:
        # torch's advice comes first, and then the fault.
        fault = str(error).rpartition('WeightsUnpickler error:')[2].strip().split('\n')[0] or type(error).__name__
        if isinstance(error, pickle.UnpicklingError):
            named = re.search(r'GLOBAL ([\w.]+)', str(error))
            raise ForbiddenContent(
                f'asks for {named[1]}' if named else f"holds what torch's safe loader does not read ({fault})"
            ) from error
        raise ValueError(fault) from error


def torchs_own_is_safe() -> bool:
    """Return True if torch's safe loader has no known hole here and can be told what mmengine saves."""
    return tuple(int(part) for part in torch.__version__.split('.')[:2]) >= (2, 10)


def _may_share_arrays(archive: Any) -> bool:
    """Return True if torch's safe loader might make a tensor of an array's memory, as torch saved it from XLA devices.

    The file could then set the array's state again, which frees that memory. Our unpickler makes no such tensors.
    """
    return archive is None or b'_rebuild_device_tensor_from_numpy' in archive.get_record('data.pkl')


def _load_by_ours(path: str, map_location: Any, tensors_alone: bool, archive: Any) -> Any:
    ours: Any = type('_Limited', (_Unpickler,), dict(tensors_alone=tensors_alone, archive=archive, sizes={}))
    # torch.load uses these attributes of a pickle module.
    module = SimpleNamespace(
        __name__=__name__, Unpickler=ours, load=lambda file, **options: ours(file, **options).load()
    )
    return torch.load(path, map_location=map_location, weights_only=False, pickle_module=module)


def _archive(path: str) -> Any:
    """Return torch's reader of a zip file, None for torch's old format; raise an error for other formats."""
    with open(path, 'rb') as file:
        head = file.read(4)
    # torch takes no other zip files as such.
    if head == b'PK\x03\x04':
        archive = torch._C.PyTorchFileReader(path)
        # torch below 2.6 would run it.
        if torch.serialization._is_torchscript_zip(archive):
            refuse('is a TorchScript archive, which is code')
        return archive
    # torch below 2.6 would unpack a tar file.
    if head[:1] != b'\x80' or tarfile.is_tarfile(path):
        raise ValueError(f'no checkpoint of torch; it starts with {head!r}')
    return None
