"""The tools that draw what attention does, on small untrained models: each writes a picture and its numbers."""

from __future__ import annotations

import csv
import re
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
from conftest import ROOT, needs_mmpretrain, over_shapes, tool
from mmengine.structures import BaseDataElement
from shapes import write_shapes

import mmgate  # noqa: F401
from mmgate.analysis.figures.maps import seen_part
from mmgate.analysis.loading import UNTRAINED
from mmgate.train import cli
from mmgate.train.config_file import read_config

CONFIGS = dict(
    detr='plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py',
    mask2former='plug/mask2former/plug-mask2former_r18_1xb8-1k_shapes-128x128.py',
    pvt='vanilla/mask_rcnn/mask-rcnn_pvt-demo_1xb8-8e_shapes.py',
    agent='agent/mask_rcnn/agent-mask-rcnn_pvt-demo_1xb8-8e_shapes.py',
    saga='saga/mask_rcnn/saga-mask-rcnn_swin-demo_1xb8-8e_shapes.py',
)

CLASSIFIERS = ('sdpa_gate/classification/sdpa-gate-vit', 'dgsa/classification/dgvit')


@pytest.fixture(scope='module')
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The demos' configs over one small image."""
    root = tmp_path_factory.mktemp('looks')
    write_shapes(root / 'shapes', num_train=1, num_val=1, size=64)
    for name, config in CONFIGS.items():
        (root / f'{name}.py').write_text(over_shapes(f'configs/{config}', root / 'shapes'))
    return {name: str(root / f'{name}.py') for name in CONFIGS}


def draw(name: str, config: str, out: Path, *options: str) -> list[dict[str, str]]:
    """Run a tool and return the rows of its CSV."""
    assert cli.main(tool(name).main, [config, UNTRAINED, *options, '--max-images', '1', '--out', str(out)]) == 0
    (picture,), (table,) = out.glob('*.png'), out.glob('*.csv')
    assert picture.stat().st_size > 5_000 and picture.stem == table.stem
    return list(csv.DictReader(table.open()))


@pytest.mark.parametrize('model', ['detr', 'mask2former'])
def test_an_identity_gate_is_zero(model: str, configs: dict[str, str], tmp_path: Path) -> None:
    rows = draw('plot_gates', configs[model], tmp_path)
    assert rows and {float(row[key]) for row in rows for key in ('mean', 'std', 'minimum', 'maximum')} == {0}


def test_gates_and_ranks_of_saga(configs: dict[str, str], tmp_path: Path) -> None:
    """Gates start around a half, ranks stay below the channels."""
    means = {row['gate']: float(row['mean']) for row in draw('plot_gates', configs['saga'], tmp_path / 'gates')}
    assert means['gate_k'] == pytest.approx(0.5, abs=0.05) and means['gate_out'] == pytest.approx(0, abs=0.1)
    for row in draw('plot_kv_rank', configs['saga'], tmp_path / 'rank'):
        assert 1 <= float(row['effective_rank']) <= float(row['matrix_rank']) <= float(row['channels'])


def test_sinks_lie_above_uniform(configs: dict[str, str], tmp_path: Path) -> None:
    rows = draw('plot_attention_sink', configs['mask2former'], tmp_path, '--against', configs['pvt'], UNTRAINED)
    assert {row['model'] for row in rows} == {'mask2former', 'pvt'}
    assert all(float(row['largest_head_share']) >= float(row['sink_share']) >= float(row['uniform']) for row in rows)
    assert 'layers.0.cross_attn' in rows[0]['layer'] and 'layers.0.self_attn' in rows[1]['layer']  # as they run
    assert all(float(row['maximum_activation']) > 0 for row in rows)


@needs_mmpretrain
def test_classifiers_have_a_first_token_and_heads(tmp_path: Path) -> None:
    """Gated attention's ViT beside M-DGSA's, whose heads inhibit, on four images."""
    for number in range(4):
        image = np.random.default_rng(number).integers(0, 256, (32, 32, 3), np.uint8)
        cv2.imwrite(str(tmp_path / f'{number}.png'), image)
    given = ['--images', *(str(tmp_path / f'{number}.png') for number in range(4))]
    gated, signed = (str(ROOT / f'configs/{name}_1xb64-40e_digits.py') for name in CLASSIFIERS)
    for row in draw('plot_attention_sink', gated, tmp_path / 'sink', *given):
        assert float(row['sink_share']) >= float(row['first_token_share']) > 0
        assert float(row['maximum_activation']) >= float(row['first_token_activation']) > 0
    rows = draw('plot_cka', gated, tmp_path / 'cka', *given)
    assert {round(float(row['cka']), 4) for row in rows if row['layer'] == row['other']} == {1.0}
    heads = ['--part', 'heads', '--layer', '1', '--against', gated, UNTRAINED, *given[:2]]
    values = [float(row['attention']) for row in draw('plot_rollout', signed, tmp_path / 'heads', *heads)]
    assert len(values) == 2 * 4 * 16 and min(values[:64]) < 0 < min(values[64:])


def test_a_picture_shows_what_the_model_sees() -> None:
    """Classifiers resize the shorter side and crop to the middle."""
    sample = BaseDataElement(metainfo=dict(img_shape=(4, 4), scale_factor=(0.5, 0.5)))
    picture = np.arange(8 * 12).reshape(8, 12)
    np.testing.assert_array_equal(seen_part(picture, sample), picture[:, 2:10])
    sample.set_metainfo(dict(img_shape=(4, 6)))
    assert seen_part(picture, sample).shape == (8, 12)


@pytest.mark.parametrize('model', ['pvt', 'agent', 'saga'])
def test_relevance_of_a_rollout_sums_to_one(model: str, configs: dict[str, str], tmp_path: Path) -> None:
    """Through PVT's reductions, agents, and the windows of the last stage of a SAGA-Swin."""
    rows = draw('plot_rollout', configs[model], tmp_path)
    assert sum(float(row['relevance']) for row in rows) == pytest.approx(1, abs=1e-3)


def test_relevance_of_each_query_sums_to_one(configs: dict[str, str], tmp_path: Path) -> None:
    """Mask2Former's queries, beside a model of the same kind, on the finest of its levels."""
    config = configs['mask2former']
    rows = draw('plot_rollout', config, tmp_path, '--queries', '3', '0', '--against', config, UNTRAINED)
    assert {row['model'] for row in rows} == {'mask2former (first)', 'mask2former (second)'}
    assert {row['query'] for row in rows} == {'0', '3'} and len(rows) == 2 * 2 * 8 * 8
    assert sum(float(row['relevance']) for row in rows) == pytest.approx(4, abs=1e-3)
    assert all(0 <= int(row['label']) < 6 and 0 < float(row['score']) < 1 for row in rows)


@pytest.mark.parametrize(
    ('model', 'part', 'error'),
    [('mask2former', 'image', 'no self-attention over the image'), ('pvt', 'queries', 'no decoder attends densely')],
)
def test_rollout_takes_no_queries_for_an_image(
    model: str, part: str, error: str, configs: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [configs[model], UNTRAINED, '--part', part, '--max-images', '1', '--out', str(tmp_path)]
    assert cli.main(tool('plot_rollout').main, arguments) == 2
    assert error in capsys.readouterr().err


def test_agents_have_their_maps(configs: dict[str, str], tmp_path: Path) -> None:
    rows = draw('plot_agents', configs['agent'], tmp_path)
    assert [int(row['agent']) for row in rows] == list(range(9)) and all(0 < float(row['largest']) <= 1 for row in rows)


def test_cka_of_a_layer_with_itself_is_one(configs: dict[str, str], tmp_path: Path) -> None:
    rows = draw('plot_cka', configs['pvt'], tmp_path)
    assert {round(float(row['cka']), 4) for row in rows if row['layer'] == row['other']} == {1.0}


def test_efficiency_of_two_backbones(
    configs: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [configs['pvt'], configs['agent'], '--sizes', '32', '64', '--repetitions', '1', '--out', str(tmp_path)]
    assert cli.main(tool('plot_efficiency').main, arguments) == 0
    rows = list(csv.DictReader((tmp_path / 'efficiency.csv').open()))
    assert (tmp_path / 'efficiency.png').stat().st_size > 5_000
    assert [row['provider'] for row in rows[:2]] == ['pvt', 'agent'] and {row['x'] for row in rows} == {
        '32_b1',
        '64_b1',
    }
    assert all(float(row['y_20']) <= float(row['y_50']) <= float(row['y_80']) for row in rows)
    assert {row['metric'] for row in rows} == {'throughput', 'peak memory'}
    assert cli.main(tool('plot_efficiency').main, [configs['pvt'], '--sizes', '8', '--out', str(tmp_path)]) == 2
    assert 'sides of 32 pixels or more' in capsys.readouterr().err
    assert cli.main(tool('plot_efficiency').main, [configs['pvt'], configs['pvt'], '--out', str(tmp_path)]) == 2


def test_efficiency_of_what_rules_gate(configs: dict[str, str], tmp_path: Path) -> None:
    rule = dict(type='SDPAGatedMultiheadAttention', path='backbone.layers.*.*.*.attn')
    (tmp_path / 'gated.py').write_text(
        f"_base_ = {configs['pvt']!r}\nmodel = dict(type='mmgate.Gated', host='mmdet.MaskRCNN', attention={rule!r})"
    )
    built = tool('plot_efficiency').backbone(read_config(str(tmp_path / 'gated.py')))
    assert any(type(module).__name__.startswith('SDPAGated') for module in built.modules())


def write_log(folder: Path, seed: int, value: float) -> Path:
    log = folder / '20260101_000000/vis_data/scalars.json'
    log.parent.mkdir(parents=True)
    log.write_text(f'{{"loss": 1, "time": 0.5, "memory": 9}}\n{{"mIoU": {value}, "step": 1}}')
    log.with_name('config.py').write_text(f"randomness = {{'seed': {seed}}}")
    return folder


@pytest.mark.parametrize(
    ('seeds', 'said'),
    [
        ((0, 1, 0, 1), ''),
        ((0, 1, 1, 2), 'the seeds of a are [0, 1], those of b [1, 2]'),
        ((0, 1, 0), 'lr=0.1 has 1 runs and a 2'),
    ],
    ids=['paired', 'other seeds', 'fewer'],
)
def test_compare_runs_pairs_seeds(
    seeds: tuple[int, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = zip(('0', '1', 'lr=0.1', '3'), seeds, (30.0, 40.0, 32.0, 43.0), strict=False)
    folders = [str(write_log(tmp_path / name, seed, value)) for name, seed, value in runs]
    groups = [f'a={",".join(folders[:2])}', folders[2] if len(seeds) == 3 else f'b={",".join(folders[2:])}']
    assert cli.main(tool('compare_runs').main, [*groups, '--out', str(tmp_path / 'out')]) == 0
    printed = capsys.readouterr()
    assert said in printed.err if said else 'warning' not in printed.err
    if len(seeds) == 4:
        assert '| b | 2 | 37.500 | 7.778 | a | 2.500 | -3.853 to 8.853 | 0.126 |' in printed.out
    for wrong, reason in ((str(tmp_path / 'none'), 'is no work dir'), (f'a={folders[0]},{folders[0]}', 'given twice')):
        assert cli.main(tool('compare_runs').main, [wrong, '--out', 'x']) == 2
        assert reason in capsys.readouterr().err


def test_report_draws_every_pair_and_trains_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tools that it calls are tried above; here they leave a picture and a log. The page needs nothing else."""
    report, calls = tool('report'), []

    def run(command: list[str]) -> None:
        calls.append(command)
        if command[0] == '-m':
            work_dir = write_log(Path(command[command.index('--work-dir') + 1]), 0, 9)
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
    assert against[against.index('--against') + 1] == report.VANILLA_DETR
    page = (tmp_path / 'a/index.html').read_text()
    assert page.count('<img') == len(drawn) and page.count('<table') == 3 and '<td>9</td>' in page
    assert not re.search(r'(src|href)="(?!data:|#)', page) and 'alt="&lt;plot_gates&gt;"' in page
    calls.clear()
    stopped = tmp_path / 'runs' / Path(report.DETR).stem
    (stopped / Path(report.DETR).name).write_text('train_cfg = dict(max_epochs=2)')
    shutil.rmtree(stopped / '20260101_000000')
    assert cli.main(report.main, [*arguments, str(tmp_path / 'b')]) == 0
    (again,) = (call for call in calls if call[0] == '-m')
    assert again[2] == report.DETR and '--resume' in again
