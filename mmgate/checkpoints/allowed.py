"""The classes and functions that a checkpoint of mmengine may name beside tensors; some are replaced by safe ones.

torch's safe loader refuses all but tensors. The other objects that mmengine saves (optimizer states, the message hub's
histories with numpy arrays) are on the list below, and nothing else is called.
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
    # str is missing, because it makes a text of any length from nested lists.
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


class ForbiddenContent(ValueError):
    """Error: a checkpoint holds something that may run code or fill the memory; the message names it."""


def refuse(content: str) -> NoReturn:
    """Raise :class:`ForbiddenContent` with a message such as "calls os.system"."""
    raise ForbiddenContent(content)


def find_allowed(module: str, name: str) -> Any:
    """Return the class or function that a name in a checkpoint may mean; raise an error for a name not on the list."""
    module = OLD_NAMES.get(module, module)
    if name in REPLACED.get(module, {}):
        return REPLACED[module][name]
    # Protocol 4 of pickle writes attributes as names with dots, older ones as calls of getattr.
    if module == HistoryBuffer.__module__ and name.startswith('HistoryBuffer.'):
        return _attribute(_History, name.partition('.')[2])
    # No name on the list has a dot.
    if name in ALLOWED.get(module, ()):
        return getattr(import_module(module), name)
    refuse(f'asks for {module}.{name}')


class _History(HistoryBuffer):
    """Safe replacement for mmengine's HistoryBuffer while a checkpoint is read; it can only be made empty.

    Made from nested lists, a real one could become a huge array.
    """

    def __new__(cls, *content: object) -> _History:
        """Make an empty history; raise an error if pickle passes content to it. Its state is set later."""
        if content:
            refuse('calls HistoryBuffer')
        return object.__new__(cls)

    def __setstate__(self, state: dict[str, object]) -> None:
        """Become a real HistoryBuffer with the saved state, except for its statistics, which could replace methods."""
        self.__class__ = HistoryBuffer
        self.__dict__.update({key: value for key, value in state.items() if 'statistics' not in key})


class _Array:
    """Safe replacement for numpy's ndarray while a checkpoint is read; the real one would allocate any size."""


class _OneCycle:
    """Safe replacement for mmengine's OneCycleParamScheduler, whose annealing functions checkpoints refer to."""


def _attribute(owner: object, name: str) -> Callable[..., Any]:
    """Return one of the few attributes that a checkpoint may ask for; a safe replacement for ``getattr``.

    A HistoryBuffer names its statistics by it, and OneCycleLR its annealing.
    """
    if owner is _History and name in ('min', 'max', 'current', 'mean'):
        return getattr(HistoryBuffer, name)
    if owner is _OneCycle and name in ('_annealing_cos', '_annealing_linear'):
        return getattr(OneCycleParamScheduler, name)
    refuse(f'asks for the attribute {name} of {owner!r}')


def _dtype(name: str, *_: object) -> np.dtype:
    """Return a numpy dtype of numbers or strings; a safe replacement for ``numpy.dtype``, without objects.

    Structures are refused, too, and the alignment is ignored.
    """
    if not isinstance(name, str) or not re.fullmatch(r'[<|=]?(?:[biufcSU]\d+|\?|b1)', name):
        refuse(f'asks numpy for the type {name!r}')
    return np.dtype(name)


def _empty_array(kind: object, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an empty array, as which pickle begins each one; a safe replacement for numpy's function."""
    if kind is not _Array or tuple(shape) != (0,):
        refuse(f'asks numpy for an array of shape {shape} out of nothing')
    return np.ndarray(shape, dtype)


def _scalar(dtype: object, content: object = None) -> np.generic:
    """Return a numpy scalar made of bytes; a safe replacement for numpy's function, which could hold objects."""
    if not isinstance(dtype, np.dtype) or not isinstance(content, bytes):
        refuse('asks numpy for a scalar of an object')
    return np.frombuffer(content, dtype)[0]


def _bytes(text: str, encoding: str) -> bytes:
    """Return text encoded as latin-1; a safe replacement for ``_codecs.encode``, by which old pickles write bytes."""
    if not isinstance(text, str) or encoding != 'latin1':
        refuse(f'asks for the encoding {encoding}')
    return text.encode(encoding)


def _no_bytes(*content: object) -> bytes:
    """Return empty bytes; a safe replacement for ``bytes``, which old pickles call for an empty array."""
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
