"""The tools on a tiny detector, vanilla and gated: trained, tested, counted, exported; mistakes."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT, run_python, tool
from helpers.small_demo import logged, run, write_demo
from mmengine.config import Config

from mmgate.analysis.complexity import count_config
from mmgate.mm import cli
from mmgate.mm.config_file import merge_options, read_config
from mmgate.mm.gate_options import put_rules
from mmgate.registry import MODELS

PLUG = 'PLuGMultiScaleDeformableAttention'
ENCODER = 'encoder.layers.*.self_attn'
GATE = ['--gate', f'{ENCODER},decoder.layers.*.cross_attn={PLUG}(gml="sum")']


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo(tmp_path_factory.mktemp('project'))


@pytest.fixture(autouse=True)
def work(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A work dir, beside the user's folder with data and configs, in which a test runs."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv('MMGATE_TRACEBACK', raising=False)
    monkeypatch.setenv('TRITON_INTERPRET', '0')
    return str(tmp_path / 'work')


def test_train_then_test_with_all_outputs(work: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Trained as a user does, in a process, with options that the mm tools take."""
    options = [
        *('train_dataloader.pin_memory=False', 'optim_wrapper.paramwise_cfg.norm_decay_mult=0.0'),
        *('model.test_cfg.score_thr=0.1', 'env_cfg.resource_limit=4096', 'optim_wrapper.accumulative_counts=4'),
        'activation_checkpointing=[backbone.layer1]',
    ]
    command = ['gated.py', '--work-dir', work, '--auto-scale-lr', '--cfg-options', *options]
    run_python(ROOT / 'tools/train.py', *command)
    assert 'Scaling the original LR by 0.25' in logged(work)
    outputs = ['--work-dir', f'{work}/test', '--out', f'{work}/out.pkl', '--show-dir', 'painted', '--tta']
    run(cli.test, 'gated.py', f'{work}/epoch_1.pth', *outputs)
    assert 'coco/bbox_mAP_50' in ''.join(capfd.readouterr())
    assert Path(f'{work}/out.pkl').stat().st_size > 0
    assert len(list(Path(work, 'test').rglob('painted/*.jpg'))) == 2


def test_a_gated_run_and_the_config_that_it_dumps(work: str) -> None:
    """The dumped config is trained by the same tool, from another folder's work dir, and the gates are tested."""
    gates = [*GATE, '--train', 'attention']
    seed = ['--cfg-options', 'randomness.seed=0']
    run(cli.train, 'vanilla.py', *gates, '--work-dir', f'{work}/gated', *seed)
    dumped = Config.fromfile(f'{work}/gated/vanilla.py')
    assert (dumped.model.type, dumped.model.host, dumped.model.train) == ('mmgate.Gated', 'DeformableDETR', 'attention')
    run(cli.train, f'{work}/gated/vanilla.py', '--work-dir', f'{work}/again', *seed)
    logs = [next(Path(work, name).glob('*/vis_data/scalars.json')).read_text() for name in ('gated', 'again')]
    losses = [[row['loss'] for row in map(json.loads, log.splitlines()) if 'loss' in row] for log in logs]
    assert losses[0] and losses[0] == losses[1]
    run(cli.test, 'vanilla.py', f'{work}/gated/epoch_1.pth', *gates, '--work-dir', f'{work}/tested')
    assert re.search(r'(\d+) of \1 keys of DeformableDETR were loaded', logged(f'{work}/tested'))
    extract = ['extract', 'vanilla.py', f'{work}/gated/epoch_1.pth', f'{work}/gates.safetensors', *gates]
    assert cli.main(tool('gates', 'model_converters').main, extract) == 0
    run(cli.train, 'vanilla.py', '--gates', f'{work}/gates.safetensors', '--work-dir', f'{work}/from_file')
    assert Config.fromfile(f'{work}/from_file/vanilla.py').model.gates == f'{work}/gates.safetensors'


def test_counting_and_listing(capsys: pytest.CaptureFixture[str]) -> None:
    """Of what gates replace the paper counts nothing, which is said."""
    counts = []
    for options in ([], GATE, [*GATE, '--train', 'gates']):
        assert cli.main(tool('get_flops').main, ['vanilla.py', '--shape', '64', '--json', *options]) == 0
        counts.append(json.loads(capsys.readouterr().out.splitlines()[-1])['parameters'])
    vanilla, gated, alone = counts
    assert gated - vanilla == alone > 0
    assert cli.main(tool('list_attention').main, ['vanilla.py', *GATE]) == 0
    assert capsys.readouterr().out.count('gated by PLuGDeformableGate') == 2
    config = 'mmgate::agent/retinanet/agent-retinanet_pvt-t_1x_coco.py'
    tool('get_flops').main([config, '--shape', '64'])
    counted = count_config(read_config(config), 64, 64)
    said = capsys.readouterr().out
    assert counted.unused > 1e6 and f'{counted.unused / 1e6:6.3f} M, frozen and not counted above' in said
    assert f'{counted.parameters / 1e6:10.3f} M' in said and f'{counted.macs / 1e9:10.3f} G' in said


OUTSIDE = """
from mmgate.gates.plug import PLuGDeformableGate
from mmgate.registry import MODELS

@MODELS.register_module()
class OutsideAttention(PLuGDeformableGate):
    pass
"""


def test_a_gate_of_another_package_is_named_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error says how to import its module; with that the gate is there, and the dumped config has the import."""
    (tmp_path / 'outside_gates.py').write_text(OUTSIDE)
    monkeypatch.setattr(MODELS, '_module_dict', dict(MODELS.module_dict))
    gate = f'{ENCODER}=OutsideAttention'
    options = ['--cfg-options', 'custom_imports.imports=outside_gates']
    for given, said in (([], options[0] + ' custom_imports.imports='), (options, 'PYTHONPATH')):
        assert cli.main(tool('list_attention').main, ['vanilla.py', '--gate', gate, *given]) == 2
        assert said in capsys.readouterr().err
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cli.main(tool('list_attention').main, ['vanilla.py', '--gate', gate, *options]) == 0
    assert capsys.readouterr().out.count('gated by OutsideAttention') == 1
    cfg = read_config('vanilla.py')
    merge_options(cfg, {'custom_imports.imports': 'outside_gates'})
    put_rules(cfg, [gate])
    assert cfg.custom_imports.imports == ['mmgate', 'outside_gates']


def test_the_benchmark_of_a_model_gates_its_peer(tmp_path: Path) -> None:
    options = ['--size', '64', '64', '--batch', '1', '--repetitions', '1', '--device', 'cpu']
    out = tmp_path / 'steps.csv'
    command = ['--peer', 'vanilla.py', *GATE, *options, '--out', str(out)]
    assert cli.main(tool('benchmark_training').main, command) == 0
    names = {row['provider'] for row in csv.DictReader(out.open())}
    assert names == {'vanilla', 'vanilla, gated, auto'}


@pytest.mark.slow
def test_export_of_a_gated_model(tmp_path: Path) -> None:
    pytest.importorskip('onnxruntime')
    out = tmp_path / 'gated.onnx'
    command = ['vanilla.py', 'untrained', *GATE, '--fixed-size', '--max-images', '1', '--score-thr', '0.01']
    assert cli.main(tool('export', 'deploy').main, [*command, '--out', str(out)]) == 0
    assert out.stat().st_size > 0


READ = r'The rules, as they were read:\n  attention\[0\]: '  # of the command line
ON_A_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason='runs here')
# What is wrong, in a config or in a --gate, and what the message says.
MISTAKES = [
    ("model = dict(attention=dict(type='PLuGMultiScaleDeformableAtention'))", rf'Did you mean\n  {PLUG}'),
    ("model = dict(_delete_=True, type='mmgate.Gated', attention=[])", 'mmgate.Gated needs host'),
    ("model = dict(host='mmdet.DeformableDERT')", 'DeformableDERT'),
    ("model = dict(attention=dict(path='encoder.*.attn'))", 'matches no module.*encoder.layers.0.self_attn'),
    pytest.param(
        "model = dict(attention=dict(backend='triton'))",
        "ms_deform_attn: backend 'triton' cannot run here: it is for CUDA tensors",
        marks=ON_A_GPU,
    ),
    (f'encoder.layers.9.self_attn={PLUG}', f'matches no module.*coder.layers.0.self_attn.*{READ}'),
    (f'{ENCODER}=PLuGMultiheadAttention', f'does not replace.*{READ}'),
    (f"{ENCODER}={PLUG}(gml='some')", f'gml.*{READ}'),
]


@pytest.mark.parametrize('wrong, message', MISTAKES)
def test_one_message_says_what_to_change(
    wrong: str, message: str, work: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = wrong.startswith('model')
    (tmp_path / 'config.py').write_text(f'_base_ = {str(Path("gated.py").absolute())!r}\n{wrong}\n')
    given = [str(tmp_path / 'config.py')] if changed else ['vanilla.py', '--gate', wrong]
    run(cli.train, *given, '--work-dir', work, status=2)
    error = capsys.readouterr().err
    assert re.search(f'error: .*{message}', error, re.DOTALL) and 'Traceback' not in error, error
    assert not list(tmp_path.rglob('*.pth'))


@pytest.mark.parametrize(
    'key, arguments, status, message',
    [
        ('no.key', ['--cfg-options', 'load_from=some.pth'], 2, '0 of .* keys .* were loaded from some.pth'),
        ('query_embedding.weight', ['--cfg-options', 'load_from=some.pth'], 0, 'keys of DeformableDETR were loaded'),
        ('no.key', ['--resume', 'some.pth'], 2, 'some.pth holds nothing but weights.*load_from=some.pth'),
        ('no.key', ['--resume', 'gated.py'], 2, 'checkpoint gated.py cannot be read'),
        ('no.key', ['some.pth'], 2, 'error: 0 of .*give --allow-mismatch'),
        ('no.key', ['some.pth', '--allow-mismatch', '--cfg-options', 'model.bbox_head.num_classes=2'], 0, '0 of'),
    ],
    ids=['nothing_fits', 'little_fits', 'resume_from_weights', 'unreadable', 'test', 'test_all_the_same'],
)
def test_checkpoints_of_other_models(
    key: str, arguments: list[str], status: int, message: str, work: str, capfd: pytest.CaptureFixture[str]
) -> None:
    # with what is left of a run in one that was published, or into which gates were merged
    torch.save({'state_dict': {key: torch.zeros(30, 256)}, 'meta': dict(iter=1, epoch=1)}, 'some.pth')
    command = cli.test if arguments[0] == 'some.pth' else cli.train
    run(command, '--work-dir', work, 'gated.py', *arguments, status=status)
    assert re.search(message, ''.join(capfd.readouterr()), re.DOTALL)
