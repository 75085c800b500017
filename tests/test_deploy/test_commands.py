"""What the tools of deployment refuse, before any work starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import tool
from exported import exports
from torch import Tensor

from mmgate.deploy import export as exporting
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


@exports
@pytest.mark.parametrize('size, tried', [((64, 96), [1, 32, 0]), ((64, 65), [1, 0])], ids=str)
def test_what_is_refused_leaves_the_file_that_was_there(
    size: tuple[int, int], tried: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []

    class Network(torch.nn.Module):
        def preprocess(self, batch: dict[str, list[Tensor]]) -> tuple[Tensor, ...]:
            return (batch['inputs'][0][None],)

    def write(net: object, inputs: object, path: Path, *, divisor: int, **_: object) -> str:
        path.write_bytes(b'refused')
        written.append(divisor)
        return 'images'

    def differs(*_: object) -> None:
        raise ConfigError('it differs')

    fakes = dict(check_finds_something=print, build_network=lambda model: Network(), write=write, _compared=differs)
    for name, function in fakes.items():
        monkeypatch.setattr(exporting, name, function)
    path = tmp_path / 'model.pt2'
    path.write_bytes(b'earlier')
    with pytest.raises(ConfigError, match='Identity cannot be exported: ConfigError: it differs'):
        exporting.export(torch.nn.Identity(), [dict(inputs=[torch.zeros(3, *size)])], path, format='torch-export')
    assert written == tried  # of one size where the graph of any may be at fault
    assert path.read_bytes() == b'earlier' and list(tmp_path.iterdir()) == [path]
