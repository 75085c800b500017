"""The page with all pictures."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, tool
from helpers.runs import write_log

from mmgate.train import cli


def test_report_draws_every_pair_and_trains_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tools that it calls leave a picture and a log here. The page needs nothing else."""
    report, calls = tool('report'), []

    def run(command: list[str]) -> None:
        calls.append(command)
        if command[0] == '-m':
            work_dir = write_log(Path(command[command.index('--work-dir') + 1]), {1: 9})
            (work_dir / 'last_checkpoint').write_text(str(work_dir / 'epoch_1.pth'))
            (work_dir / Path(command[2]).name).write_text('train_cfg = dict(max_epochs=1)')
        elif '--out' in command:
            out = Path(command[command.index('--out') + 1])
            out.mkdir(parents=True)
            shutil.copy(ROOT / 'configs/plug/deformable_detr/demo.jpg', out / f'<{Path(command[0]).stem}>.png')

    monkeypatch.setattr(report, 'run', run)
    monkeypatch.chdir(ROOT)
    arguments = ['--work-dirs', str(tmp_path / 'runs'), '--out']
    assert cli.main(report.main, [*arguments, str(tmp_path / 'a')]) == 0
    trained, drawn = ([call for call in calls if word in call] for word in ('mmgate.tools.train', '--out'))
    assert len(trained) == 7 == len({call[2] for call in trained}) and len(calls) == 8 + len(drawn)
    assert all(Path(call[0]).is_file() for call in calls if call not in trained)
    against = next(call for call in drawn if 'sampling_points' in call[0])
    vanilla, gated = report.FAMILIES['shapes']['Deformable DETR']
    assert against[against.index('--against') + 1] == vanilla and against[1] == gated
    counts = {Path(call[0]).stem: call[call.index('--max-images') + 1] for call in drawn if '--max-images' in call}
    assert counts['plot_cka'] == '4' and counts['plot_gates'] == '2'
    page = (tmp_path / 'a/index.html').read_text()
    assert page.count('<img') == len(drawn) and page.count('<table') == 3 and '<td>9</td>' in page
    assert not re.search(r'(src|href)="(?!data:|#)', page) and 'alt="&lt;plot_gates&gt;"' in page
    calls.clear()
    stopped = tmp_path / 'runs' / Path(gated).stem
    (stopped / Path(gated).name).write_text('train_cfg = dict(max_epochs=2)')
    shutil.rmtree(stopped / '20260101_000000')
    assert cli.main(report.main, [*arguments, str(tmp_path / 'b')]) == 0
    (again,) = (call for call in calls if call[0] == '-m')
    assert again[2] == gated and '--resume' in again


def test_report_of_real_images_leaves_out_what_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """It ends before a training where no images are there."""
    report = tool('report')
    families = report.FAMILIES['real']
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'configs').symlink_to(ROOT / 'configs')
    assert cli.main(report.main, ['--data', 'real']) == 2
    assert 'data/bccd and data/camvid not there: configs/real/README.md says where' in capsys.readouterr().err
    (tmp_path / 'data/bccd').mkdir(parents=True)
    assert list(report.with_images(families)) == ['Deformable DETR', 'RetinaNet with PVT']
    assert 'The page is without Mask2Former. data/camvid not there' in capsys.readouterr().out
    assert all(Path(config).is_file() for configs in families.values() for config in configs)
    (tmp_path / 'data/bccd').rmdir()
    (tmp_path / 'data/camvid').mkdir()
    calls: list[list[str]] = []

    def run(command: list[str]) -> None:
        calls.append(command)
        if command[0] == '-m':
            work_dir = write_log(Path(command[command.index('--work-dir') + 1]), {1: 9})
            (work_dir / 'last_checkpoint').write_text(str(work_dir / 'iter_1000.pth'))

    monkeypatch.setattr(report, 'run', run)
    assert cli.main(report.main, ['--data', 'real']) == 0
    drawn = [Path(call[0]).stem for call in calls if call[0] != '-m']
    assert drawn == ['compare_runs', 'plot_gates', 'plot_attention_sink', 'plot_cka']


def test_an_unknown_time_is_no_number(tmp_path: Path) -> None:
    """As of a run that is too short to have one."""
    report = tool('report')
    page = report.write_page(tmp_path, 'title', [report.Section('a', '', '', [], [{'s a step': float('nan')}])])
    assert '<td>-</td>' in page.read_text()
