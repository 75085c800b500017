"""Loaders of checkpoint files and URLs for mmengine that run no code in a checkpoint.

A pickle may call any function by its name, and mmengine's loaders use torch's unsafe mode.
"""

from __future__ import annotations

import logging
import os
import os.path as osp
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mmengine.runner.checkpoint import CheckpointLoader

from mmgate._environment import log
from mmgate.errors import TRUST, ConfigError, UntrustedCheckpoint

from .allowed import ForbiddenContent
from .download import download
from .plain_config import what_runs
from .unpickler import load_file

HOW_TO_TRUST = f'If you trust whoever made it, pass --trust-checkpoint, or set {TRUST}=1'


def load_checkpoint_file(filename: str, map_location: Any = None, *, tensors_alone: bool = False) -> Any:
    """Load a checkpoint from a local file without running code in it.

    Args:
        filename: Path.
        map_location: Argument of :func:`torch.load`; tensors of a ``.safetensors`` file are on the CPU.
        tensors_alone: True leaves objects other than tensors, numbers, strings and plain containers empty, in trusted
            files, too.

    Returns:
        The content of the file; for a ``.safetensors`` file a dict of ``state_dict`` and ``meta``.

    Raises:
        FileNotFoundError: There is no such file.
        UntrustedCheckpoint: It uses a function that is on no list, or is a TorchScript archive (unless trusted).
        ConfigError: It cannot be read, most often because it is cut short.
    """
    path = osp.expanduser(filename)
    if not osp.isfile(path):
        raise FileNotFoundError(f'checkpoint {filename} is no file (looked for {osp.abspath(path)}).')
    trusted = is_trusted() and not tensors_alone
    try:
        checkpoint = load_file(path, map_location, trusted=trusted, tensors_alone=tensors_alone)
    except ForbiddenContent as error:
        remedy = f'{HOW_TO_TRUST}; it is then loaded as pickle does, code and all.'
        if tensors_alone:
            remedy = 'Tensors alone are read here, of a file that is trusted, too.'
        raise UntrustedCheckpoint(
            f'checkpoint {filename} {error}, which no checkpoint of mmengine does and which may run code of whoever '
            f'made the file; it was not loaded. {remedy}'
        ) from error
    except ValueError as error:
        raise ConfigError(
            f'checkpoint {filename} cannot be read ({error}); it may be cut short, or a web page that was saved in its '
            'place. Copy it again, delete it if it was downloaded (it then is once more), or take an earlier one.'
        ) from error
    if not trusted and not tensors_alone:
        _leave_out_configs_that_run(filename, checkpoint)
    return checkpoint


def load_checkpoint_url(filename: str, map_location: Any = None) -> Any:
    """Download a checkpoint once into torch's cache and load it as :func:`load_checkpoint_file` does.

    Raises:
        ConfigError: It cannot be downloaded or read.
        UntrustedCheckpoint: See :func:`load_checkpoint_file`.
    """
    return load_checkpoint_file(str(download(filename)), map_location)


def is_trusted() -> bool:
    """Return True if the option ``--trust-checkpoint`` or the environment allows checkpoints to run code."""
    return os.environ.get(TRUST, '') not in ('', '0')


@contextmanager
def guarded_loaders() -> Iterator[None]:
    """Let mmengine load checkpoints with the safe loaders of this module inside a ``with`` block.

    There they serve mmengine's Runner, ``init_cfg`` and the inferencers, and every other caller of mmengine's
    ``load_checkpoint`` in the process. The loaders from before are back at the end. Our command lines run in such a
    block. Importing mmgate changes no loader, because other packages in the process rely on mmengine's.
    """
    ours = {'': load_checkpoint_file, 'http://': load_checkpoint_url, 'https://': load_checkpoint_url}
    former = {scheme: CheckpointLoader._schemes[scheme] for scheme in ours}
    for scheme, loader in ours.items():
        CheckpointLoader.register_scheme(scheme, loader, force=True)
    try:
        yield
    finally:
        for scheme, loader in former.items():
            CheckpointLoader.register_scheme(scheme, loader, force=True)


def _leave_out_configs_that_run(filename: str, checkpoint: object) -> None:
    """Remove configs that would run code from the checkpoint's metadata, with a warning.

    mmengine executes the text of such a config when it resumes, and in its inferencers.
    """

    def inner(owner: object, key: str) -> Any:
        # Not by the object's own attribute: a file may give an OrderedDict another ``get``.
        return dict.get(owner, key) if isinstance(owner, dict) else None

    for place in (inner(checkpoint, 'meta'), inner(inner(checkpoint, 'message_hub'), 'runtime_info')):
        for key in ('config', 'cfg'):
            text = inner(place, key)
            found = what_runs(text) if isinstance(text, str) else None
            if found:
                del place[key]
                log(
                    f'checkpoint {filename}: its config was left out, because mmengine would run it: {found}. '
                    f'{HOW_TO_TRUST}.',
                    logging.WARNING,
                )
