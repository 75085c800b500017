"""What a checkpoint of mmengine may ask for beside tensors, and what stands for numpy's and Python's own functions.

torch's safe loader refuses all but tensors; what mmengine puts beside them (optimizer states, the message hub's
histories with numpy arrays) is on the list below, and nothing else is called.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
from mmengine.logging import HistoryBuffer
from mmengine.optim.scheduler.param_scheduler import OneCycleParamScheduler

from .guarded_pickle import GuardedUnpickler, refuse

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
    'mmengine.logging.history_buffer': {'HistoryBuffer'},
}
OLD_NAMES = {'__builtin__': 'builtins', 'copy_reg': 'copyreg', 'mmcv.utils.config': 'mmengine.config.config'}


class ListedUnpickler(GuardedUnpickler):
    """Calls what is listed, and refuses the rest by name."""

    dispatch = dict(GuardedUnpickler.dispatch)

    def find_other(self, module: str, name: str) -> Any:
        """Return what stands for a name."""
        module = OLD_NAMES.get(module, module)
        if name in REPLACED.get(module, {}):
            return REPLACED[module][name]
        if module == HistoryBuffer.__module__ and name.startswith('HistoryBuffer.'):  # protocol 4 asks for no getattr
            return _attribute(HistoryBuffer, name.partition('.')[2])
        if name in ALLOWED.get(module, ()):  # a name with dots is in none
            return getattr(import_module(module), name)
        refuse(f'asks for {module}.{name}')

    def load_build(self) -> None:
        """Change an object; a type of numpy's is what its name says."""
        state, found = self.stack[-1], self.stack[-2]
        if isinstance(found, np.dtype):  # its state holds flags and addresses of numpy's; the name has said all
            if not isinstance(state, tuple) or state[1:2] not in (('<',), ('|',), ('=',)):
                refuse('holds numbers of another byte order')
            self.stack.pop()
        else:
            super().load_build()

    def load_reduce(self) -> None:
        """Call a function, but for a history with content."""
        if self.stack[-2] is HistoryBuffer:  # mmengine's are made empty; nested lists would become a huge array
            refuse('calls HistoryBuffer')
        super().load_reduce()

    def _instantiate(self, kind: Any, arguments: Any) -> None:
        refuse(f'makes an object of {kind!r} as Python 2 did')

    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.REDUCE[0]] = load_reduce


class _Array:
    """In the place of numpy's ndarray, which would make memory of any size."""


class _OneCycle:
    """In the place of mmengine's OneCycleParamScheduler, which is asked for its annealing functions alone."""


def _attribute(owner: Any, name: str) -> Callable[..., Any]:
    """Stand for ``getattr``: a HistoryBuffer names its statistics by it, OneCycleLR its annealing."""
    if owner is HistoryBuffer and not name.startswith('_'):
        return getattr(HistoryBuffer, name)
    if owner is _OneCycle and name in ('_annealing_cos', '_annealing_linear'):
        return getattr(OneCycleParamScheduler, name)
    refuse(f'asks for the attribute {name} of {owner!r}')


def _dtype(name: str, align: bool = False, copy: bool = False) -> np.dtype:
    """Stand for numpy's dtype: numbers and strings, no objects and no structures."""
    if not isinstance(name, str) or not re.fullmatch(r'[<|=]?(?:[biufcSU]\d+|\?|b1)', name):
        refuse(f'asks numpy for the type {name!r}')
    return np.dtype(name)


def _empty_array(kind: Any, shape: Any, dtype: Any) -> np.ndarray:
    """Stand for numpy's function that makes the array whose content follows: it is always empty at first."""
    if kind is not _Array or tuple(shape) != (0,):
        refuse(f'asks numpy for an array of shape {shape} out of nothing')
    return np.ndarray(shape, dtype)


def _scalar(dtype: np.dtype, content: Any = None) -> Any:
    """Stand for numpy's function that makes a scalar of its bytes."""
    if not isinstance(dtype, np.dtype) or dtype.hasobject or not isinstance(content, bytes):
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
    'mmengine.optim.scheduler.param_scheduler': {'OneCycleParamScheduler': _OneCycle},
    'numpy.core.multiarray': _NUMPY,
    'numpy._core.multiarray': _NUMPY,
}
