"""Checkpoints are whole or not there, old ones go last, and a resumed run finds the youngest whole one."""

from __future__ import annotations

import errno
import os
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mmengine.config import Config
from mmengine.fileio import FileClient, LocalBackend, get_file_backend, put, register_backend
from mmengine.fileio.io import backend_instances
from mmengine.hooks import CheckpointHook
from torch import nn

from mmgate.engine import whole_checkpoints
from mmgate.engine.fault_hooks import FiniteHook, ReproducibleHook
from mmgate.engine.preflight import ConfigError
from mmgate.engine.whole_checkpoints import (
    WholeFileBackend,
    checkpoint_folders,
    last_whole_checkpoint,
    remove_after_saving,
    remove_unfinished,
    write_whole_files,
)


@pytest.fixture
def whole_files() -> Any:
    write_whole_files()
    yield
    register_backend('local', LocalBackend, force=True, prefixes='')
    backend_instances.clear()


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, 'No space left on device')


@pytest.mark.parametrize('cached', [False, True], ids=['new', 'cached'])
def test_mmengine_writes_by_renaming(cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend_instances.clear()
    if cached:
        get_file_backend(str(tmp_path / 'x'))
    write_whole_files()
    (tmp_path / 'real').mkdir()
    (tmp_path / 'real/a.pth').write_bytes(b'old')
    (tmp_path / 'a.pth').symlink_to(tmp_path / 'real/a.pth')
    put(b'new', str(tmp_path / 'a.pth'))
    assert (tmp_path / 'real/a.pth').read_bytes() == b'new' and (tmp_path / 'a.pth').is_symlink()

    monkeypatch.setattr(whole_checkpoints.os, 'fsync', full)
    with pytest.raises(ConfigError, match=r'a.pth cannot be written \(No space left.*untouched'):
        put(b'newer', str(tmp_path / 'a.pth'))
    assert (tmp_path / 'a.pth').read_bytes() == b'new'
    assert sorted(path.name for path in tmp_path.rglob('*')) == ['a.pth', 'a.pth', 'real']
    register_backend('local', LocalBackend, force=True, prefixes='')
    backend_instances.clear()


def test_the_old_clients_write_by_renaming(whole_files: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = FileClient(backend='disk')
    client.put(b'old', str(tmp_path / 'a.pth'))
    monkeypatch.setattr(whole_checkpoints.os, 'replace', full)
    with pytest.raises(ConfigError, match='untouched'):
        FileClient.infer_client(None, str(tmp_path)).put(b'new', str(tmp_path / 'a.pth'))
    assert (tmp_path / 'a.pth').read_bytes() == b'old'


def test_a_pipe_stays_one(whole_files: None, tmp_path: Path) -> None:
    """So does a device; as root, renaming would put a file in the place of /dev/null."""
    os.mkfifo(tmp_path / 'pipe')
    reader = os.open(tmp_path / 'pipe', os.O_RDONLY | os.O_NONBLOCK)
    put(b'content', str(tmp_path / 'pipe'))
    assert os.read(reader, 99) == b'content' and (tmp_path / 'pipe').is_fifo()
    os.close(reader)


def test_permissions_are_those_of_a_file(whole_files: None, tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        put(b'x', str(tmp_path / 'a.pth'))
    finally:
        os.umask(mask)
    assert (tmp_path / 'a.pth').stat().st_mode & 0o777 == 0o640


def runner_with(hook: CheckpointHook, folder: Path, save: Any) -> Any:
    hub = SimpleNamespace(update_info=lambda *_: None, get_info=lambda *_: None)
    runner: Any = SimpleNamespace(hooks=[hook], message_hub=hub, work_dir=str(folder), save_checkpoint=save)
    hook.out_dir, hook.file_backend, hook.keep_ckpt_ids = str(folder), LocalBackend(), deque(maxlen=1)
    return runner


def test_old_checkpoints_go_once_the_new_one_is_there(tmp_path: Path) -> None:
    hook = CheckpointHook(interval=1, max_keep_ckpts=1)
    there: list[list[str]] = []

    def save(folder: str, name: str, *_: Any, **__: Any) -> None:
        there.append(sorted(path.name for path in tmp_path.glob('*.pth')))
        if name == 'epoch_3.pth':
            raise ConfigError('full')
        Path(folder, name).write_bytes(b'x')

    runner = runner_with(hook, tmp_path, save)
    remove_after_saving(runner)
    for step in (1, 2):
        hook._save_checkpoint_with_step(runner, step, meta={})
    with pytest.raises(ConfigError):
        hook._save_checkpoint_with_step(runner, 3, meta={})
    assert there == [[], ['epoch_1.pth'], ['epoch_2.pth']]
    assert [path.name for path in tmp_path.glob('*.pth')] == ['epoch_2.pth']
    assert (tmp_path / 'last_checkpoint').read_text().endswith('epoch_2.pth')


def test_one_name_for_all_is_kept(tmp_path: Path) -> None:
    hook = CheckpointHook(interval=1, max_keep_ckpts=1, filename_tmpl='latest.pth')
    runner = runner_with(hook, tmp_path, lambda folder, name, *_, **__: Path(folder, name).write_bytes(b'x'))
    remove_after_saving(runner)
    for step in (1, 2, 3):
        hook._save_checkpoint_with_step(runner, step, meta={})
    assert (tmp_path / 'latest.pth').is_file()


def test_object_stores_are_mmengines(tmp_path: Path) -> None:
    (tmp_path / 'last_checkpoint').write_text('s3://bucket/epoch_3.pth')
    assert last_whole_checkpoint(str(tmp_path)) == ('s3://bucket/epoch_3.pth', None)


def written(folder: Path, name: str, time: int, *, whole: bool = True) -> Path:
    path = folder / name
    torch.save(dict(state_dict={}), path)
    if not whole:
        path.write_bytes(path.read_bytes()[:200])
    os.utime(path, (time, time))
    return path


def test_the_youngest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert last_whole_checkpoint(folder) == (None, None)
    written(tmp_path, 'epoch_9.pth', 9)
    second, third = written(tmp_path, 'epoch_10.pth', 10), written(tmp_path, 'epoch_11.pth', 11)
    note = tmp_path / 'last_checkpoint'
    note.write_text(str(third))
    assert last_whole_checkpoint(folder) == (str(third), None)
    written(tmp_path, 'epoch_11.pth', 11, whole=False)
    found, warning = last_whole_checkpoint(folder)
    assert found == str(second) and warning == f'{third} is cut short or damaged; the run goes on from {second}.'
    written(tmp_path, 'epoch_11.pth', 11)
    content = third.read_bytes()
    third.write_bytes(content.replace(b'state_dict', b'state_dyct'))
    assert last_whole_checkpoint(folder)[0] == str(second)
    note.write_text('')  # killed while writing it
    assert last_whole_checkpoint(folder)[0] == str(second)
    note.write_text(str(tmp_path / 'epoch_12.pth'))
    assert 'epoch_12.pth is gone' in str(last_whole_checkpoint(folder)[1])
    for name in ('epoch_9.pth', 'epoch_10.pth'):
        written(tmp_path, name, 9, whole=False)
    with pytest.raises(ConfigError, match='there is no other whole checkpoint'):
        last_whole_checkpoint(folder)


def test_what_a_killed_run_began_is_removed(tmp_path: Path) -> None:
    begun = []

    def killed(path: Any, mode: int) -> None:
        begun.append(path)
        raise SystemExit  # stands for a kill, after which nothing is cleaned up

    with pytest.MonkeyPatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(os, 'chmod', killed)
        patched.setattr(os, 'unlink', lambda path: None)
        WholeFileBackend().put(b'x', tmp_path / 'epoch_1.pth')
    others = [tmp_path / name for name in ('epoch_1.pth', '.hidden', '.notes-abcdefgh', 'x.pth-abcdefgh')]
    for other in others:
        other.touch()
    assert os.path.exists(begun[0])
    remove_unfinished(str(tmp_path), str(tmp_path / 'none'))
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_the_last_checkpoint_of_a_copied_folder(tmp_path: Path) -> None:
    last = written(tmp_path, 'epoch_12.pth', 10)
    written(tmp_path, 'epoch_2.pth', 11)
    (tmp_path / 'last_checkpoint').write_text('/gone/work/epoch_12.pth')
    found, warning = last_whole_checkpoint(str(tmp_path))
    assert found == str(last) and 'is gone; the run goes on from' in str(warning)


def test_checkpoints_of_another_run_are_kept(tmp_path: Path) -> None:
    """A run that was resumed from elsewhere has that run's best checkpoint for its own."""
    hook = CheckpointHook(interval=1)
    best = tmp_path / 'other/best_mIoU_iter_6.pth'
    best.parent.mkdir()
    (tmp_path / 'new').mkdir()
    best.write_bytes(b'x')
    runner = runner_with(hook, tmp_path / 'new', lambda *_, **__: hook.file_backend.remove(str(best)))
    remove_after_saving(runner)
    hook._save_checkpoint_with_step(runner, 1, meta={})
    assert best.is_file()


@pytest.mark.parametrize('root', ['elsewhere', '/absolute'], ids=['relative', 'absolute'])
def test_checkpoints_of_a_run_elsewhere(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mmengine's hook adds the run's name to its out_dir; the note is in the work dir."""
    monkeypatch.chdir(tmp_path)
    root = f'{tmp_path}{root}' if root.startswith('/') else root
    hooks = dict(default_hooks=dict(checkpoint=dict(type='CheckpointHook', out_dir=root), logger=None))
    remote = [dict(type='CheckpointHook', out_dir='s3://bucket')]
    folders = checkpoint_folders(Config(dict(hooks, custom_hooks=remote, work_dir='work/run/')))
    assert folders == [f'{root}/run']
    (tmp_path / 'work/run').mkdir(parents=True)
    Path(root, 'run').mkdir(parents=True)
    older = written(Path(root, 'run'), 'interrupted.pth', 10)
    last = written(Path(root, 'run'), 'epoch_11.pth', 11, whole=False)
    for note in (str(last), ''):
        Path('work/run/last_checkpoint').write_text(note)
        found, warning = last_whole_checkpoint('work/run', *folders)
        assert found == str(older.absolute()) and warning
    Path('work/run/last_checkpoint').write_text(str(last))
    assert last_whole_checkpoint('work/run')[0] == found  # beside what the note names


class Overflows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1), nn.Linear(1, 1)
        self.act = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.second(self.first(x)))


@pytest.mark.parametrize('layer', ['first', 'second', None])
def test_finite_hook_names_the_layer(layer: str | None) -> None:
    model, hook = Overflows(), FiniteHook()
    runner: Any = SimpleNamespace(model=model, iter=6)
    hook.before_train(runner)
    hook.before_train_iter(runner, 0)
    hook.after_train_iter(runner, 0, outputs=dict(loss=model(torch.ones(1, 1))))
    if layer:
        nn.init.constant_(getattr(model, layer).weight, float('inf'))
    hook.before_train_iter(runner, 0)
    loss = model(torch.ones(1, 1)) * (1 if layer else float('nan'))
    where = f'first layer whose output was not finite is {layer}$'[:-1] if layer else 'every layer was finite'
    with pytest.raises(ConfigError, match=f'loss is not finite at iteration 7; .*{where}'):
        hook.after_train_iter(runner, 0, outputs=dict(loss=[loss], other=torch.ones(1)))
    hook.after_train(runner)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    'seed, keeps, error',
    [(None, False, 'needs a seed'), (0, True, 'persistent_workers=False')],
    ids=['seed', 'workers'],
)
def test_reproducible_hook_refuses(seed: int | None, keeps: bool, error: str) -> None:
    loader = SimpleNamespace(persistent_workers=keeps, num_workers=1)
    runner = SimpleNamespace(_randomness_cfg=dict(seed=seed), train_dataloader=loader, train_loop=None)
    with pytest.raises(ConfigError, match=error):
        ReproducibleHook().before_train(runner)
