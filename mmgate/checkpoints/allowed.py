"""The classes and functions that a checkpoint may name beside those of tensors; some are replaced by safe ones.

They are what mmengine saves beside tensors (histories with numpy arrays, states of schedulers), and the plain
containers of other training scripts.
"""

from __future__ import annotations

import re
from _codecs import encode
from argparse import Namespace
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from pathlib import PosixPath, PurePosixPath
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
from mmengine.config import ConfigDict
from mmengine.logging import HistoryBuffer
from mmengine.optim.scheduler.param_scheduler import OneCycleParamScheduler


class ForbiddenContent(ValueError):
    """Error: a checkpoint holds something that may run code; the message names it."""


def refuse(content: str) -> NoReturn:
    """Raise :class:`ForbiddenContent` with a message such as "calls os.system"."""
    raise ForbiddenContent(content)


class _Array:
    """Safe replacement for the class of numpy's arrays, whose call allocates memory or looks into another array's."""


def _attribute(owner: object, name: str) -> Callable[..., Any]:
    """Return one of the few attributes that a checkpoint may ask for; a safe replacement for ``getattr``.

    A HistoryBuffer of mmengine names its statistics by it, and OneCycleLR its annealing.
    """
    if owner is HistoryBuffer and name in ('min', 'max', 'current', 'mean'):
        return getattr(HistoryBuffer, name)
    if owner is OneCycleParamScheduler and name in ('_annealing_cos', '_annealing_linear'):
        return getattr(OneCycleParamScheduler, name)
    refuse(f'asks for the attribute {name} of {owner!r}')


def _dtype(name: str, *_: object) -> np.dtype:
    """Return one of numpy's own dtypes of numbers; a safe replacement for ``numpy.dtype``.

    Of these numpy ignores the state that a pickle sets next. Set on a dtype of text or objects, flags and sizes that do
    not fit let numpy read and write foreign memory.
    """
    if not isinstance(name, str) or not re.fullmatch(r'[<|=]?(?:[biufc]\d+|\?)', name):
        refuse(f'asks numpy for the type {name!r}')
    return np.dtype(name)


def _empty_array(cls: object, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an empty array, as which pickle begins each one; a safe replacement for numpy's function."""
    if cls is not _Array or tuple(shape) != (0,):
        refuse(f'asks numpy for an array of shape {shape} out of nothing')
    return np.ndarray(shape, dtype)


def _scalar(dtype: object, content: object = None) -> np.generic:
    """Return a numpy scalar made of bytes; a safe replacement for numpy's function, which could hold objects."""
    if not isinstance(dtype, np.dtype) or not isinstance(content, bytes):
        refuse('asks numpy for a scalar of an object')
    return np.frombuffer(content, dtype)[0]


def _bytes(*content: object) -> bytes:
    """Return empty bytes; a safe replacement for ``bytes``, which old pickles call for an empty array."""
    if content:
        refuse('asks for builtins.bytes')
    return b''


_CONTAINERS = (bool, complex, dict, float, frozenset, int, list, set, slice, tuple, Counter, defaultdict, deque)
_PLAIN = (*_CONTAINERS, date, datetime, timedelta, timezone, Namespace, SimpleNamespace)
_STATISTICS = ('min', 'max', 'current', 'mean')
ALLOWED: dict[str, Any] = {
    **{f'{cls.__module__}.{cls.__qualname__}': cls for cls in (*_PLAIN, HistoryBuffer, ConfigDict)},
    # Newer Pythons have the paths in other modules.
    **{f'pathlib.{cls.__name__}': cls for cls in (PosixPath, PurePosixPath)},
    'mmcv.utils.config.ConfigDict': ConfigDict,
    'builtins.getattr': _attribute,
    # Protocol 4 of pickle writes attributes as names with dots.
    **{f'{HistoryBuffer.__module__}.HistoryBuffer.{name}': getattr(HistoryBuffer, name) for name in _STATISTICS},
    f'{OneCycleParamScheduler.__module__}.OneCycleParamScheduler': OneCycleParamScheduler,
    'builtins.bytes': _bytes,
    '_codecs.encode': encode,  # older protocols write bytes by it
    'numpy.dtype': _dtype,
    'numpy.ndarray': _Array,
    **{f'numpy.{core}.multiarray._reconstruct': _empty_array for core in ('core', '_core')},
    **{f'numpy.{core}.multiarray.scalar': _scalar for core in ('core', '_core')},
    # No pickle finds these; they are here because a state may be set on their objects.
    'an array': np.ndarray,
    **{f'a dtype {code}': type(np.dtype(code)) for code in '?bBhHiIlLqQefdgFDG'},
}
