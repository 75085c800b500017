"""The tools that draw what attention does, on small untrained models: each writes a picture and its numbers."""

from __future__ import annotations

import csv
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


def test_agents_have_their_maps(configs: dict[str, str], tmp_path: Path) -> None:
    rows = draw('plot_agents', configs['agent'], tmp_path)
    assert [int(row['agent']) for row in rows] == list(range(9)) and all(0 < float(row['largest']) <= 1 for row in rows)


def test_cka_of_a_layer_with_itself_is_one(configs: dict[str, str], tmp_path: Path) -> None:
    rows = draw('plot_cka', configs['pvt'], tmp_path)
    assert {round(float(row['cka']), 4) for row in rows if row['layer'] == row['other']} == {1.0}


def test_efficiency_of_two_backbones(configs: dict[str, str], tmp_path: Path) -> None:
    arguments = [configs['pvt'], configs['agent'], '--sizes', '32', '64', '--repetitions', '1', '--out', str(tmp_path)]
    assert cli.main(tool('plot_efficiency').main, arguments) == 0
    rows = list(csv.DictReader((tmp_path / 'efficiency.csv').open()))
    assert (tmp_path / 'efficiency.png').stat().st_size > 5_000
    assert [row['provider'] for row in rows[:2]] == ['pvt', 'agent']
    assert {row['x'] for row in rows} == {'32_b1', '64_b1'}
    assert all(float(row['y_20']) <= float(row['y_50']) <= float(row['y_80']) for row in rows)
    assert {row['metric'] for row in rows} == {'throughput', 'peak memory'}


def test_efficiency_of_what_rules_gate(configs: dict[str, str], tmp_path: Path) -> None:
    rule = dict(type='SDPAGatedMultiheadAttention', path='backbone.layers.*.*.*.attn')
    (tmp_path / 'gated.py').write_text(
        f"_base_ = {configs['pvt']!r}\nmodel = dict(type='mmgate.Gated', host='mmdet.MaskRCNN', attention={rule!r})"
    )
    built = tool('plot_efficiency').backbone(read_config(str(tmp_path / 'gated.py')))
    assert any(type(module).__name__.startswith('SDPAGated') for module in built.modules())
