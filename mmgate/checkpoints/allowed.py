"""What a checkpoint of mmengine may ask for beside tensors, and what stands for numpy's and Python's own functions.

torch's safe loader refuses all but tensors; what mmengine puts beside them (optimizer states, the message hub's
histories with numpy arrays) is on the list below, and nothing else is called.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn

import numpy as np
from mmengine.logging import HistoryBuffer
from mmengine.optim.scheduler.param_scheduler import OneCycleParamScheduler

ALLOWED = {
    'collections': {'Counter', 'defaultdict', 'deque'},
    # no str: of nested lists it makes a text of any length
    'builtins': {'complex', 'dict', 'float', 'frozenset', 'int', 'list', 'set', 'slice', 'tuple', 'bool'},
    'datetime': {'date', 'datetime', 'timedelta', 'timezone'},
    'pathlib': {'Path', 'PosixPath', 'PurePosixPath'},
    'argparse': {'Namespace'},
    'types': {'SimpleNamespace'},
    'torch._utils': {'_rebuild_parameter_with_state', '_rebuild_sparse_tensor'},
    'torch.nn.parameter': {'Parameter'},
    'torch.serialization': {'_get_layout'},
    'mmengine.config.config': {'ConfigDict'},
}
OLD_NAMES = {'__builtin__': 'builtins', 'copy_reg': 'copyreg', 'mmcv.utils.config': 'mmengine.config.config'}


class UnsafeCheckpoint(ValueError):
    """A checkpoint asks for what may run code or fill the memory; the message is what it does, as "calls os.system"."""


def refuse(what: str) -> NoReturn:
    """Raise :class:`UnsafeCheckpoint`."""
    raise UnsafeCheckpoint(what)


def listed(module: str, name: str) -> Any:
    """Return what stands for a name in a checkpoint of mmengine, and refuse one that is on no list."""
    module = OLD_NAMES.get(module, module)
    if name in REPLACED.get(module, {}):
        return REPLACED[module][name]
    if module == HistoryBuffer.__module__ and name.startswith('HistoryBuffer.'):  # protocol 4 asks for no getattr
        return _attribute(_History, name.partition('.')[2])
    if name in ALLOWED.get(module, ()):  # a name with dots is in none
        return getattr(import_module(module), name)
    refuse(f'asks for {module}.{name}')


class _History(HistoryBuffer):
    """In the place of mmengine's HistoryBuffer: it makes empty ones; nested lists would become a huge array."""

    def __new__(cls, *content: Any) -> Any:
        """Return an empty history, whose content follows."""
        if content:
            refuse('calls HistoryBuffer')
        return object.__new__(cls)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become mmengine's, with all but the statistics, which would replace those of its class."""
        self.__class__ = HistoryBuffer
        self.__dict__.update({key: value for key, value in state.items() if 'statistics' not in key})


class _Array:
    """In the place of numpy's ndarray, which would make memory of any size."""


class _OneCycle:
    """In the place of mmengine's OneCycleParamScheduler, which is asked for its annealing functions alone."""


def _attribute(owner: Any, name: str) -> Callable[..., Any]:
    """Stand for ``getattr``: a HistoryBuffer names its statistics by it, OneCycleLR its annealing."""
    if owner is _History and name in ('min', 'max', 'current', 'mean'):
        return getattr(HistoryBuffer, name)
    if owner is _OneCycle and name in ('_annealing_cos', '_annealing_linear'):
        return getattr(OneCycleParamScheduler, name)
    refuse(f'asks for the attribute {name} of {owner!r}')


def _dtype(name: str, *_: Any) -> np.dtype:
    """Stand for numpy's dtype, whose alignment means nothing here: numbers and strings, no objects, no structures."""
    if not isinstance(name, str) or not re.fullmatch(r'[<|=]?(?:[biufcSU]\d+|\?|b1)', name):
        refuse(f'asks numpy for the type {name!r}')
    return np.dtype(name)


def _empty_array(kind: Any, shape: Any, dtype: Any) -> np.ndarray:
    """Stand for numpy's function that makes the array whose content follows: it is always empty at first."""
    if kind is not _Array or tuple(shape) != (0,):
        refuse(f'asks numpy for an array of shape {shape} out of nothing')
    return np.ndarray(shape, dtype)


def _scalar(dtype: np.dtype, content: Any = None) -> Any:
    """Stand for numpy's function that makes a scalar of its bytes; no type that is let through holds objects."""
    if not isinstance(dtype, np.dtype) or not isinstance(content, bytes):
        refuse('asks numpy for a scalar of an object')
    return np.frombuffer(content, dtype)[0]


def _bytes(text: str, encoding: str) -> bytes:
    """Stand for ``_codecs.encode``, by which pickle's older protocols spell bytes."""
    if not isinstance(text, str) or encoding != 'latin1':
        refuse(f'asks for the encoding {encoding}')
    return text.encode(encoding)


def _no_bytes(*content: Any) -> bytes:
    """Stand for ``bytes``, by which pickle's older protocols spell those of an empty array."""
    if content:
        refuse('asks for builtins.bytes')
    return b''


_NUMPY: dict[str, Callable[..., Any]] = {'_reconstruct': _empty_array, 'scalar': _scalar}
REPLACED: dict[str, dict[str, Callable[..., Any]]] = {
    'builtins': {'getattr': _attribute, 'bytes': _no_bytes},
    '_codecs': {'encode': _bytes},
    'numpy': {'dtype': _dtype, 'ndarray': _Array},
    'mmengine.logging.history_buffer': {'HistoryBuffer': _History},
    'mmengine.optim.scheduler.param_scheduler': {'OneCycleParamScheduler': _OneCycle},
    'numpy.core.multiarray': _NUMPY,
    'numpy._core.multiarray': _NUMPY,
}
