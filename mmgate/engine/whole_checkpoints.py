"""Checkpoints that are whole or not there: how they are written, kept and found again after a crash."""

from __future__ import annotations

import logging
import os
import os.path as osp
import re
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from mmengine.config import Config
from mmengine.fileio import FileClient, LocalBackend, register_backend
from mmengine.fileio.io import backend_instances
from mmengine.hooks import CheckpointHook

from mmgate.models.guarded_pickle import damaged_member

from .preflight import ConfigError, check_checkpoint, type_name

INTERRUPTED = 'interrupted.pth'  # what SaveOnInterruptHook writes
SAVED = re.compile(rf'(epoch|iter)_\d+\.pth|{re.escape(INTERRUPTED)}')
UNFINISHED = re.compile(r'\.(.+\.pth|last_checkpoint)-[a-z0-9_]{8}')  # until it is renamed


class WholeFileBackend(LocalBackend):
    """mmengine's backend for local files, which writes a file beside its place, to the disk, and then renames it.

    Whoever is killed in the middle, or meets a full disk, leaves what was there before.
    """

    def put(self, obj: bytes, filepath: str | Path) -> None:
        """Write bytes.

        Raises:
            ConfigError: The file cannot be written.
        """
        with _replacing(filepath, 'wb') as file:
            file.write(obj)

    def put_text(self, obj: str, filepath: str | Path, encoding: str = 'utf-8') -> None:
        """Write text.

        Raises:
            ConfigError: The file cannot be written.
        """
        with _replacing(filepath, 'w', encoding=encoding) as file:
            file.write(obj)


def write_whole_files() -> None:
    """Let mmengine write local files by :class:`WholeFileBackend` from here on, by ``file_client_args``, too."""
    FileClient.register_backend('disk', WholeFileBackend, force=True)
    register_backend('local', WholeFileBackend, force=True, prefixes='')
    for key in [key for key, backend in backend_instances.items() if type(backend) is LocalBackend]:
        del backend_instances[key]


def keep_quiet_when_full(logger: logging.Logger) -> None:
    """Let log files that cannot be written be so without a traceback a line; what is to be saved says it once."""
    for handler in logger.handlers:
        if isinstance(handler, logging.FileHandler):
            setattr(handler, 'handleError', partial(_handle, handler))  # noqa: B010  mypy knows it as a method


def _handle(handler: logging.Handler, record: logging.LogRecord) -> None:
    if not isinstance(sys.exc_info()[1], OSError):
        logging.Handler.handleError(handler, record)


def remove_after_saving(runner: Any) -> None:
    """Let the checkpoint hooks of a Runner remove old checkpoints once the new one is written, and not before."""
    for hook in runner.hooks:
        if isinstance(hook, CheckpointHook):
            for name in ('_save_checkpoint_with_step', '_save_best_checkpoint'):
                setattr(hook, name, partial(_save_then_remove, hook, getattr(hook, name)))


def last_whole_checkpoint(work_dir: str, *folders: str) -> tuple[str | None, str | None]:
    """Return the checkpoint that a run goes on from, and a warning if it is not the last one that was written.

    Args:
        work_dir: Of the run. What its ``last_checkpoint`` names counts, if it is whole, there or in the work dir; else
            the youngest that is.
        *folders: Where the run's checkpoints lie, if not there (:func:`checkpoint_folders`).

    Raises:
        ConfigError: There are checkpoints, and all of them are cut short.
    """
    note = Path(work_dir, 'last_checkpoint')
    named = note.read_text().strip() if note.is_file() else ''
    if named and _is_whole(named):  # what lies in an object store is mmengine's to read
        return named, None
    places = dict.fromkeys(Path(folder).absolute() for folder in (work_dir, *folders, osp.dirname(named) or work_dir))
    others = [path for place in places for path in place.glob('*.pth') if SAVED.fullmatch(path.name)]
    if not named and not (note.is_file() and others):
        return None, None
    # in a copied folder all are young; the note's name is then the last one's
    moved = Path(work_dir, osp.basename(named)).absolute() if named else None
    whole = sorted(filter(_is_whole, others), key=lambda path: (path == moved, path.stat().st_mtime_ns))
    what = f'{named} is {"cut short or damaged" if osp.exists(named) else "gone"}' if named else f'{note} is empty'
    if not whole:
        raise ConfigError(
            f'{what}, and there is no other whole checkpoint in {", ".join(map(str, places))}. Train without --resume, '
            'or into another --work-dir.'
        )
    return str(whole[-1]), f'{what}; the run goes on from {whole[-1]}.'


def remove_unfinished(*folders: str) -> None:
    """Remove what a killed run had begun to write; only for a run that goes on in its place."""
    for folder in folders:
        for path in Path(folder).glob('.*'):
            if UNFINISHED.fullmatch(path.name):
                with suppress(OSError):
                    path.unlink()


def checkpoint_folders(cfg: Config) -> list[str]:
    """Return the local folders other than the work dir into which a config's checkpoint hooks write."""
    hooks = [*(cfg.get('default_hooks') or {}).values(), *(cfg.get('custom_hooks') or [])]
    saving = [hook for hook in hooks if hook and type_name(hook).endswith('CheckpointHook')]
    roots = [str(hook['out_dir']) for hook in saving if hook.get('out_dir')]
    run = osp.basename(cfg.work_dir.rstrip('/'))  # mmengine gives every run a folder there
    return [osp.join(root, run) for root in roots if '://' not in root]


def _is_whole(path: str | Path) -> bool:
    try:
        check_checkpoint(str(path), sharded=True)
    except ConfigError:
        return False
    return not zipfile.is_zipfile(path) or damaged_member(path) is None


@contextmanager
def _replacing(filepath: str | Path, mode: str, **options: Any) -> Iterator[IO[Any]]:
    path = Path(osp.realpath(filepath))  # a link stays one
    if path.exists() and not path.is_file():  # a device or a pipe
        with path.open(mode, **options) as file:
            yield file
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, new = tempfile.mkstemp(dir=path.parent, prefix=f'.{path.name}-')
        try:
            with os.fdopen(handle, mode, **options) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.chmod(new, path.stat().st_mode if path.exists() else 0o666 & ~_umask())
            os.replace(new, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(new)
            raise
    except OSError as error:
        raise ConfigError(
            f'{filepath} cannot be written ({error.strerror or error}); what was there before is untouched. Make room, '
            'and go on with --resume.'
        ) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class _RemoveLater:
    """A file backend that notes what it is to remove."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.late: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def remove(self, path: str) -> None:
        self.late.append(('remove', path))

    def rmtree(self, path: str) -> None:
        self.late.append(('rmtree', path))


def _is_below(path: str, folder: str) -> bool:
    return '://' in path or Path(path).absolute().is_relative_to(Path(folder).absolute())


def _save_then_remove(hook: CheckpointHook, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    backend = hook.file_backend
    if isinstance(backend, _RemoveLater):  # the best one is saved by way of the other
        return save(*args, **kwargs)
    # mmengine removes first; a disk that is full by then would leave a run without any checkpoint
    hook.file_backend = noted = _RemoveLater(backend)
    try:
        save(*args, **kwargs)
    finally:
        hook.file_backend = backend
    for method, path in noted.late:
        kept = path in (hook.last_ckpt, getattr(hook, 'best_ckpt_path', None))  # a name without a number
        if not kept and _is_below(path, hook.out_dir):  # elsewhere is what this run was resumed from
            getattr(backend, method)(path)
    return None
