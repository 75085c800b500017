"""What the tools of deployment refuse, before any work starts."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tool
from helpers.exported import exports
from torch import Tensor

from mmgate.deploy import export as exporting
from mmgate.deploy import time_limit as limits
from mmgate.deploy.runtime import Exported
from mmgate.errors import ConfigError


def test_an_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, '__version__', '2.1.2')
    with pytest.raises(ConfigError, match=r'needs torch 2\.9 or newer, this is 2\.1\.2: .* maintained forks'):
        tool('export', 'deploy').main(['no-config.py', 'no.pth'])


@exports
@pytest.mark.parametrize(
    ('out', 'options', 'reason'),
    [
        ('file/a.onnx', [], 'nothing can be written to .*/file'),
        ('a.onnx', ['--format', 'torch-export'], r'a\.onnx: a file of --format torch-export ends with \.pt2'),
    ],
)
def test_what_cannot_be_written(out: str, options: list[str], reason: str, tmp_path: Path) -> None:
    pytest.importorskip('onnxruntime', reason='needs the extra "deploy"')
    (tmp_path / 'file').write_text('')
    with pytest.raises(ConfigError, match=reason):
        tool('export', 'deploy').main(['no-config.py', 'no.pth', '--out', str(tmp_path / out), *options])


@pytest.mark.parametrize(
    ('name', 'trusted', 'reason'),
    [
        ('model.pth', False, r'is no exported file: give an \.onnx or a \.pt2 file'),
        ('model.pt2', False, 'may hold code, which opening it would run.*--trust-checkpoint'),
        ('model.pt2', True, 'cannot be read as a program of torch'),
        ('checkpoint.pt2', True, 'cannot be read as a program of torch'),
        ('model.onnx', False, 'onnxruntime cannot read .*model.onnx'),
    ],
)
def test_what_is_no_exported_file(name: str, trusted: bool, reason: str, tmp_path: Path) -> None:
    if name.endswith('.onnx'):
        pytest.importorskip('onnxruntime', reason='needs the extra "deploy"')
    for empty in ('model.pth', 'model.pt2', 'model.onnx'):
        (tmp_path / empty).write_bytes(b'')
    torch.save({}, tmp_path / 'checkpoint.pt2')
    with pytest.raises(ConfigError, match=reason):
        Exported(tmp_path / name, trusted=trusted)


def test_a_file_is_looked_for_before_its_config() -> None:
    with pytest.raises(ConfigError, match=r'exported file missing\.onnx does not exist'):
        tool('test', 'deploy').main(['no-config.py', 'missing.onnx'])


def test_images_of_a_size_that_the_graph_does_not_take() -> None:
    run = object.__new__(Exported)
    run.path, run.notes, run._run = Path('m.onnx'), dict(divisor=2, least=8, takes='even sides'), lambda *inputs: inputs
    for height, width in ((6, 10), (10, 6), (9, 10), (10, 9)):
        with pytest.raises(ConfigError, match=f'takes even sides, this batch has {height} x {width}'):
            run(torch.zeros(1, 3, height, width))
    run(torch.zeros(1, 3, 8, 10))
    run.notes = dict(divisor=0, size=[8, 10])
    assert run.takes(8, 10) and not run.takes(8, 12)


@pytest.mark.parametrize('seconds', ['-1', 'nan', 'inf'])
def test_a_time_limit_is_seconds(seconds: str) -> None:
    with pytest.raises(ConfigError, match=rf'--time-limit {seconds}: give seconds'):
        tool('export', 'deploy').main(['no-config.py', 'no.pth', '--time-limit', seconds])


class Network(torch.nn.Module):
    def preprocess(self, batch: dict[str, list[Tensor]]) -> tuple[Tensor, ...]:
        return (batch['inputs'][0][None],)


Write = Callable[[Path, int], None]


@pytest.fixture
def export_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function that exports a model whose graph, of sides with a divisor, is written by a function of its own."""

    def run(write: Write, *, size: tuple[int, int] = (64, 96), same: bool = True, **options: Any) -> Any:
        def write_graph(net: object, inputs: object, path: Path, *, divisor: int, **_: object) -> str:
            path.write_bytes(b'begun')
            write(path, divisor)
            return 'images'

        def compared(*_: object) -> str:
            if not same:
                raise ConfigError('it differs')
            return 'compared'

        fakes = dict(check_finds_something=print, build_network=lambda model: Network())
        for name, function in (fakes | dict(write=write_graph, _compared=compared)).items():
            monkeypatch.setattr(exporting, name, function)
        batches = [dict(inputs=[torch.zeros(3, *size)])]
        return exporting.export(torch.nn.Identity(), batches, tmp_path / 'm.pt2', format='torch-export', **options)

    return run


@exports
@pytest.mark.parametrize('size, tried', [((64, 96), [1, 32, 0]), ((64, 65), [1, 0])], ids=str)
def test_what_is_refused_leaves_the_file_that_was_there(
    size: tuple[int, int], tried: list[int], tmp_path: Path, export_by: Callable[..., Any]
) -> None:
    written: list[int] = []
    path = tmp_path / 'm.pt2'
    path.write_bytes(b'earlier')
    with pytest.raises(ConfigError, match='Identity cannot be exported: ConfigError: it differs'):
        export_by(lambda path, divisor: written.append(divisor), size=size, same=False)
    assert written == tried  # of one size where the graph of any may be at fault
    assert path.read_bytes() == b'earlier' and list(tmp_path.iterdir()) == [path]


def hang(*_: object) -> None:
    """Take any time, and go on after errors, as exporters do."""
    while True:
        with suppress(Exception):
            time.sleep(0.01)


def hang_unless_fixed(path: Path, divisor: int) -> None:
    if divisor:
        hang()


@exports
def test_an_attempt_has_a_line_and_a_time_limit(
    tmp_path: Path, export_by: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(exporting, 'print_log', lambda line, logger: lines.append(line))
    alarm = signal.getsignal(signal.SIGALRM)
    assert export_by(hang_unless_fixed, seconds=0.1) == 'compared'
    assert [path.name for path in tmp_path.iterdir()] == ['m.pt2']
    expected = (
        r'attempt 1 of 3: images of any size, for 0\.1 s at the most \(--fixed-size',
        r'not to be written for images of any size: .*it took more than 0\.1 s; --time-limit gives it more',
        r'attempt 2 of 3: images of sides that 32 divides, for 0\.1 s',
        r'not to be written for images of sides that 32 divides: .*more than 0\.1 s',
        r'attempt 3 of 3: images of one size, for 0\.1 s at the most$',
        r'm\.pt2 takes images',
    )
    for line, pattern in zip(lines, expected, strict=True):
        assert re.search(pattern, line), line
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0) and signal.getsignal(signal.SIGALRM) is alarm


@exports
@pytest.mark.parametrize('fixed_size', [False, True])
def test_where_every_attempt_takes_too_long_nothing_is_left(
    fixed_size: bool, tmp_path: Path, export_by: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigError, match=r'cannot be exported: TimeoutError: it took more than 0\.1 s; --time-limit'):
        export_by(hang, seconds=0.1, fixed_size=fixed_size)
    assert not list(tmp_path.iterdir())


@exports
def test_an_export_ended_by_hand_leaves_nothing(tmp_path: Path, export_by: Callable[..., Any]) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_by(interrupt)
    assert not list(tmp_path.iterdir())


def test_what_swallows_the_stop_is_stopped_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, 'AGAIN', 0.05)
    with pytest.raises(TimeoutError, match='more than 0.05 s'), limits.time_limit(0.05):
        with suppress(BaseException):
            hang()
        hang()
    with limits.time_limit(0.05):
        pass
    time.sleep(0.1)  # no alarm is left
    with limits.time_limit(0):
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
