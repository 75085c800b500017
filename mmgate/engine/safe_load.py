"""Checkpoints from strangers: mmengine's loaders for files and web addresses, without running what a pickle asks for.

A pickle may call any function by its name. torch's safe loader refuses all but tensors; what mmengine puts beside them
(optimizer states, the message hub's histories with numpy arrays) is on the list below, and nothing else is called.
mmengine falls back to the unsafe way or never took the safe one.
"""

from __future__ import annotations

import argparse
import os
import os.path as osp
import pickle
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
from mmengine.logging import HistoryBuffer
from mmengine.optim.scheduler.param_scheduler import OneCycleParamScheduler
from mmengine.runner.checkpoint import CheckpointLoader

from mmgate.models.checkpoint_file import download
from mmgate.models.guarded_pickle import GuardedUnpickler, UnsafeCheckpoint, load_pickled, refuse
from mmgate.models.safetensors_file import read_safetensors

from .plain_config import running_part
from .preflight import ConfigError

TRUST = 'MMGATE_TRUST_CHECKPOINT'
HOW_TO_TRUST = f'If you trust whoever made it, pass --trust-checkpoint, or set {TRUST}=1'
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


class UntrustedCheckpoint(ConfigError):
    """A checkpoint would run code, or unpack into far more than it is."""


def load_checkpoint_file(filename: str, map_location: Any = None) -> Any:
    """Load a checkpoint from a file without running code in it.

    Args:
        filename: Path.
        map_location: As :func:`torch.load` takes it; what a ``.safetensors`` file holds comes on the CPU.

    Returns:
        What the file holds; of a ``.safetensors`` file its ``state_dict`` and ``meta``.

    Raises:
        FileNotFoundError: There is no such file.
        UntrustedCheckpoint: It asks for a function that is on no list, holds a config that calls some, or is a zip bomb
            or a TorchScript archive (unless trusted).
        ConfigError: It cannot be read, most often because it is cut short.
    """
    path = osp.expanduser(filename)
    if not osp.isfile(path):
        raise FileNotFoundError(f'{filename} can not be found.')
    trusted = is_trusted()
    try:
        if path.endswith('.safetensors'):
            checkpoint = read_safetensors(path)
        else:
            checkpoint = load_pickled(path, None if trusted else _SafeUnpickler, map_location)
        if not trusted:
            _refuse_configs_that_run(checkpoint)
    except UnsafeCheckpoint as error:
        raise UntrustedCheckpoint(
            f'checkpoint {filename} {error}, which no checkpoint of mmengine does and which may run code of whoever '
            f'made the file, or fill the memory; it was not loaded. {HOW_TO_TRUST}; it is then loaded as pickle does, '
            'code and all.'
        ) from error
    except ImportError as error:
        raise ConfigError(str(error)) from error
    except ValueError as error:
        raise ConfigError(
            f'checkpoint {filename} cannot be read ({error}); it may be cut short. Copy it again, delete it if it was '
            'downloaded (it then is once more), or take an earlier one.'
        ) from error
    return checkpoint


def load_checkpoint_url(filename: str, map_location: Any = None) -> Any:
    """Download a checkpoint once into torch's cache and load it as :func:`load_checkpoint_file` does.

    Raises:
        ConfigError: It cannot be downloaded or read.
        UntrustedCheckpoint: As :func:`load_checkpoint_file`.
    """
    try:
        file = download(filename)
    except ConnectionError as error:
        raise ConfigError(
            f'checkpoint {filename} cannot be downloaded ({error.__cause__}); fetch it otherwise and give the file.'
        ) from error
    return load_checkpoint_file(str(file), map_location)


def is_trusted() -> bool:
    """Return whether files may run code, by ``--trust-checkpoint`` or the environment."""
    return os.environ.get(TRUST, '') not in ('', '0')


def add_trust_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--trust-checkpoint``, which holds for this process and those that it starts."""
    parser.add_argument(
        '--trust-checkpoint',
        action=_Trust,
        nargs=0,
        help='load a checkpoint as pickle does, code and all: only one whose maker you trust',
    )


class _Trust(argparse.Action):
    def __call__(self, *_: Any) -> None:
        os.environ[TRUST] = '1'


def register_safe_loader() -> None:
    """Let mmengine load files and web addresses by the functions above, in the Runner, ``init_cfg`` and inferencers."""
    CheckpointLoader.register_scheme('', load_checkpoint_file, force=True)
    CheckpointLoader.register_scheme(('http://', 'https://'), load_checkpoint_url, force=True)


class _SafeUnpickler(GuardedUnpickler):
    """Calls what is listed."""

    dispatch = dict(GuardedUnpickler.dispatch)

    def find_other(self, module: str, name: str) -> Any:
        module = OLD_NAMES.get(module, module)
        if name in REPLACED.get(module, {}):
            return REPLACED[module][name]
        if module == HistoryBuffer.__module__ and name.startswith('HistoryBuffer.'):  # protocol 4 asks for no getattr
            return _attribute(HistoryBuffer, name.partition('.')[2])
        if name in ALLOWED.get(module, ()):  # a name with dots is in none
            return getattr(import_module(module), name)
        refuse(f'asks for {module}.{name}')

    def load_build(self) -> None:
        state, found = self.stack[-1], self.stack[-2]
        if isinstance(found, np.dtype):  # its state holds flags and addresses of numpy's; the name has said all
            if not isinstance(state, tuple) or state[1:2] not in (('<',), ('|',), ('=',)):
                refuse('holds numbers of another byte order')
            self.stack.pop()
        else:
            super().load_build()

    def load_reduce(self) -> None:
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


def _refuse_configs_that_run(checkpoint: Any) -> None:
    """Refuse configs with more than values: mmengine runs their text when it resumes, and in its inferencers."""
    if not isinstance(checkpoint, dict):
        return
    meta, hub = (checkpoint.get(key) or {} for key in ('meta', 'message_hub'))
    info = hub.get('runtime_info') if isinstance(hub, dict) else None
    for place in (meta, info):
        for key in ('config', 'cfg'):
            text = place.get(key) if isinstance(place, dict) else None
            found = running_part(text) if isinstance(text, str) else None
            if found:
                refuse(f'holds a config, {key}, with {found}')
