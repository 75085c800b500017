"""The tools on vanilla configs with ``--gate``: trained, tested, looked at, measured, exported; dumped configs run."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, over_shapes, tool
from helpers.small_demo import CONFIG, DEMO
from mmengine.config import Config
from shapes import write_shapes

from mmgate.mm import cli
from mmgate.mm.config_file import merge_options, read_config
from mmgate.mm.gate_options import put_gates
from mmgate.registry import MODELS

VANILLA = ROOT / 'configs/_base_/deformable-detr-refine_r18_1xb8-12e_shapes.py'
GATE = 'encoder.layers.*.self_attn,decoder.layers.*.cross_attn=PLuGMultiScaleDeformableAttention(gml="sum")'


def run(command: Callable[[list[str]], None], work_dir: str, *arguments: str) -> str:
    """Run a command in this process, for whose life mmengine keeps what has a name, and return its log."""
    named = [f'experiment_name=gate_option_{work_dir}', f'visualizer.name=gate_option_{work_dir}']
    options = ['--work-dir', work_dir, '--cfg-options', 'randomness.seed=0', *named]
    assert cli.main(command, [*arguments, *options]) == 0
    return ''.join(log.read_text() for log in Path(work_dir).glob('*/*.log'))


def test_a_gated_run_and_the_config_that_it_dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dumped config is trained by the same tool, from another folder's work dir, and the gates are tested."""
    monkeypatch.chdir(tmp_path)
    write_shapes('data/shapes', num_train=2, num_val=1, size=64)
    Path('vanilla.py').write_text(CONFIG.replace(str(DEMO), str(VANILLA)).replace('EPOCHS', '1'))
    gates = ['--gate', GATE, '--train', 'attention']
    run(cli.train, 'gated', 'vanilla.py', *gates)
    dumped = Config.fromfile('gated/vanilla.py')
    assert (dumped.model.type, dumped.model.host, dumped.model.train) == ('mmgate.Gated', 'DeformableDETR', 'attention')
    run(cli.train, 'again', 'gated/vanilla.py')
    logs = [next(Path(name).glob('*/vis_data/scalars.json')).read_text() for name in ('gated', 'again')]
    losses = [[row['loss'] for row in map(json.loads, log.splitlines()) if 'loss' in row] for log in logs]
    assert losses[0] and losses[0] == losses[1]
    tested = run(cli.test, 'tested', 'vanilla.py', 'gated/epoch_1.pth', *gates)
    assert re.search(r'(\d+) of \1 keys of DeformableDETR were loaded', tested)
    extract = ['extract', 'vanilla.py', 'gated/epoch_1.pth', 'gates.safetensors', *gates]
    assert cli.main(tool('gates', 'model_converters').main, extract) == 0
    run(cli.train, 'from_file', 'vanilla.py', '--gates', 'gates.safetensors')
    assert Config.fromfile('from_file/vanilla.py').model.gates == 'gates.safetensors'


@pytest.fixture
def config(tmp_path: Path) -> str:
    """The demo's vanilla config with a layer of each kind, over one small image."""
    write_shapes(tmp_path / 'shapes', num_train=1, num_val=1, size=64)
    (tmp_path / 'base.py').write_text(over_shapes('configs/_base_/' + VANILLA.name, tmp_path / 'shapes'))
    (tmp_path / 'vanilla.py').write_text(CONFIG.replace(str(DEMO), 'base.py').replace('EPOCHS', '1'))
    return str(tmp_path / 'vanilla.py')


def test_looking_at_a_gate_beside_the_vanilla_model(config: str, tmp_path: Path) -> None:
    """Both start alike, so that the points are the same; the gate is that of the first model alone."""
    against = ['--against', config, 'untrained', '--max-images', '1', '--out', str(tmp_path / 'out')]
    command = [config, 'untrained', '--gate', GATE, *against]
    assert cli.main(tool('plot_sampling_points').main, command) == 0
    (table,) = (tmp_path / 'out').glob('*.csv')
    rows = list(csv.DictReader(table.open()))
    named = [(row.pop('model'), row) for row in rows]
    gated, vanilla = ([row for name, row in named if name == wanted] for wanted in ('vanilla, gated', 'vanilla'))
    assert gated and gated == vanilla
    assert cli.main(tool('plot_gates').main, [config, 'untrained', '--gate', GATE, *against[3:]]) == 0
    assert cli.main(tool('plot_gates').main, [config, 'untrained', *against[3:]]) == 2


def test_counting_and_listing(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    counts = []
    for options in ([], ['--gate', GATE], ['--gate', GATE, '--train', 'gates']):
        assert cli.main(tool('get_flops').main, [config, '--shape', '64', '--json', *options]) == 0
        counts.append(json.loads(capsys.readouterr().out.splitlines()[-1])['parameters'])
    vanilla, gated, alone = counts
    assert gated - vanilla == alone > 0
    assert cli.main(tool('list_attention').main, [config, '--gate', GATE]) == 0
    assert capsys.readouterr().out.count('gated by PLuGDeformableGate') == 2


OUTSIDE = """
from mmgate.gates.plug import PLuGDeformableGate
from mmgate.registry import MODELS


@MODELS.register_module()
class OutsideAttention(PLuGDeformableGate):
    pass
"""


def test_a_gate_of_another_package_is_named_from_the_command_line(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error says how to import its module; with that the gate is there, and the dumped config has the import."""
    (tmp_path / 'outside_gates.py').write_text(OUTSIDE)
    monkeypatch.setattr(MODELS, '_module_dict', dict(MODELS.module_dict))
    gate = ['--gate', 'encoder.layers.*.self_attn=OutsideAttention']
    command = [config, *gate, '--cfg-options', 'custom_imports.imports=outside_gates']
    assert cli.main(tool('list_attention').main, [config, *gate]) == 2
    assert '--cfg-options custom_imports.imports=' in capsys.readouterr().err
    assert cli.main(tool('list_attention').main, command) == 2
    assert 'outside_gates' in (said := capsys.readouterr().err) and 'PYTHONPATH' in said
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cli.main(tool('list_attention').main, command) == 0
    assert capsys.readouterr().out.count('gated by OutsideAttention') == 1
    cfg = read_config(config)
    merge_options(cfg, {'custom_imports.imports': 'outside_gates'})
    put_gates(cfg, gate[1:])
    assert cfg.custom_imports.imports == ['mmgate', 'outside_gates']


@pytest.mark.parametrize('measured', [[], ['--inference']], ids=['training', 'inference'])
def test_the_benchmark_of_a_model_gates_its_peer(measured: list[str], config: str, tmp_path: Path) -> None:
    options = [*measured, '--size', '64', '64', '--batch', '1', '--repetitions', '1', '--device', 'cpu']
    out = tmp_path / 'steps.csv'
    command = ['--peer', config, '--gate', GATE, *options, '--out', str(out)]
    assert cli.main(tool('benchmark_training').main, command) == 0
    names = {row['provider'] for row in csv.DictReader(out.open())}
    assert names == {'vanilla', 'vanilla, gated, auto'}


@pytest.mark.slow
def test_export_of_a_gated_model(config: str, tmp_path: Path) -> None:
    pytest.importorskip('onnxruntime')
    out = tmp_path / 'gated.onnx'
    command = [config, 'untrained', '--gate', GATE, '--fixed-size', '--out', str(out)]
    assert cli.main(tool('export', 'deploy').main, [*command, '--max-images', '1', '--score-thr', '0.01']) == 0
    assert out.stat().st_size > 0


@pytest.mark.parametrize(
    ('gate', 'said'),
    [
        ('encoder.layers.9.self_attn=PLuGMultiScaleDeformableAttention', 'matches no module'),
        ('encoder.layers.*.self_attn=PLuGMultiheadAttention', 'does not replace'),
        ("decoder.layers.*.self_attn=PLuGMultiheadAttention(gml='some')", 'gml'),
    ],
)
def test_a_rule_that_fits_nothing_ends_before_any_work(
    gate: str, said: str, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = ['--work-dir', str(tmp_path / 'work')]
    assert cli.main(cli.train, [config, '--gate', gate, *work]) == 2
    error = capsys.readouterr().err
    assert said in error and 'The rules, as they were read:\n  attention[0]: ' in error
    assert 'coder.layers.0.self_attn' in error
    assert not (tmp_path / 'work').exists() or not list((tmp_path / 'work').glob('*.pth'))
