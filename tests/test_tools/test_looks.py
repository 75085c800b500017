"""The tools that draw: each writes a picture and its numbers, of models and images as they are, or refuses at once."""

from __future__ import annotations

import csv
from itertools import product
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import ROOT, needs_mmpretrain, over_shapes, tool
from helpers.image_sets import write_images
from mmdet.structures.bbox import get_box_tensor
from mmengine.config import Config
from mmengine.structures import BaseDataElement
from shapes import write_shapes
from torch import nn

import mmgate
from mmgate.analysis import loading
from mmgate.analysis.arguments import drawing_parser
from mmgate.analysis.figures.maps import seen_part
from mmgate.analysis.loading import UNTRAINED, load_models
from mmgate.benchmarks import backbones
from mmgate.benchmarks.measure import MODES
from mmgate.gates import SDPAGate
from mmgate.mm import cli
from mmgate.mm.config_file import read_config

CONFIGS = dict(
    detr='plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py',
    mask2former='plug/mask2former/plug-mask2former_r18_1xb8-1k_shapes-128x128.py',
    pvt='vanilla/mask_rcnn/mask-rcnn_pvt-demo_1xb8-8e_shapes.py',
    agent='agent/mask_rcnn/agent-mask-rcnn_pvt-demo_1xb8-8e_shapes.py',
    saga='saga/mask_rcnn/saga-mask-rcnn_swin-demo_1xb8-8e_shapes.py',
)
VANILLA_DETR = 'configs/_base_/deformable-detr-refine_r18_1xb8-12e_shapes.py'

CLASSIFIERS = ('configs/sdpa_gate/classification/sdpa-gate-vit', 'projects/dgsa/configs/dgvit')


@pytest.fixture(scope='module')
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The demos' configs over one small image."""
    root = tmp_path_factory.mktemp('looks')
    write_shapes(root / 'shapes', num_train=1, num_val=1, size=64)
    for name, config in CONFIGS.items():
        (root / f'{name}.py').write_text(over_shapes(f'configs/{config}', root / 'shapes'))
    return {name: str(root / f'{name}.py') for name in CONFIGS}


def look(name: str, config: str, out: Path, *options: str) -> int:
    """Run a tool on one image and return its exit status."""
    return cli.main(tool(name).main, [config, UNTRAINED, '--max-images', '1', '--out', str(out), *options])


def draw(name: str, config: str, out: Path, *options: str) -> list[dict[str, str]]:
    """Run a tool and return the rows of its CSV."""
    assert look(name, config, out, *options) == 0
    (picture,) = out.glob('*.png')
    assert picture.stat().st_size > 5_000
    return list(csv.DictReader(picture.with_suffix('.csv').open()))


@pytest.mark.parametrize('model', ['detr', 'mask2former'])
def test_an_identity_gate_is_zero(model: str, configs: dict[str, str], tmp_path: Path) -> None:
    rows = draw('plot_gates', configs[model], tmp_path)
    assert rows and {float(row[key]) for row in rows for key in ('mean', 'std', 'minimum', 'maximum')} == {0}


@needs_mmpretrain
def test_a_map_of_gates_has_every_pair(tmp_path: Path) -> None:
    """Of 16 patches and the class token, in the figure's CSV, without a pool."""
    rule = dict(type='PLuGMultiheadAttention', path='backbone.layers.*.attn', init='paper')
    base = ROOT / 'configs/vanilla/classification/vit_1xb64-40e_digits.py'
    gated = f"model = dict(type='mmgate.Gated', host='mmpretrain.ImageClassifier', attention={rule!r})"
    (tmp_path / 'gated.py').write_text(f'_base_ = {str(base)!r}\n{gated}')
    cv2.imwrite(str(tmp_path / 'image.png'), np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8))
    draw('plot_gates', str(tmp_path / 'gated.py'), tmp_path / 'out', '--images', str(tmp_path / 'image.png'))
    rows = list(csv.DictReader((tmp_path / 'out/gates_map.csv').open()))
    names = ['class', *map(str, range(16))]
    assert [(row['row'], row['column']) for row in rows] == list(product(names, names))
    assert {row['axes'] for row in rows} == {'pairs'} and len({row['gate'] for row in rows}) > 200


def test_gates_and_ranks_of_saga(configs: dict[str, str], tmp_path: Path) -> None:
    """Gates start around a half, ranks stay below the channels."""
    means = {row['gate']: float(row['mean']) for row in draw('plot_gates', configs['saga'], tmp_path / 'gates')}
    assert means['gate_k'] == pytest.approx(0.5, abs=0.05) and means['gate_out'] == pytest.approx(0, abs=0.1)
    others = ['--against', configs['saga'], UNTRAINED, '--against', configs['saga'], UNTRAINED]
    rows = draw('plot_kv_rank', configs['saga'], tmp_path / 'rank', *others)
    assert {row['model'] for row in rows} == {'saga (1)', 'saga (2)', 'saga (3)'}
    for row in rows:
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
    gated, signed = (str(ROOT / f'{name}_1xb64-40e_digits.py') for name in CLASSIFIERS)
    for row in draw('plot_attention_sink', gated, tmp_path / 'sink', *given):
        assert float(row['sink_share']) >= float(row['first_token_share']) > 0
        assert float(row['maximum_activation']) >= float(row['first_token_activation']) > 0
    rows = draw('plot_cka', gated, tmp_path / 'cka', *given)
    assert {round(float(row['cka']), 4) for row in rows if row['layer'] == row['other']} == {1.0}
    heads = ['--part', 'heads', '--layer', '1', '--against', gated, UNTRAINED, *given[:2]]
    values = [float(row['attention']) for row in draw('plot_rollout', signed, tmp_path / 'heads', *heads)]
    assert len(values) == 2 * 4 * 16 and min(values[:64]) < 0 < min(values[64:])
    for options in ([], ['--absolute']):
        rows = draw('plot_rollout', signed, tmp_path / f'rollout{len(options)}', *given[:2], *options)
        values = [float(row['relevance']) for row in rows]
        assert sum(map(abs, values)) == pytest.approx(1, abs=1e-3) and (min(values) < 0) == (not options)


@needs_mmpretrain
@pytest.mark.parametrize('name', ['cifar100', 'svhn'])
def test_a_rollout_of_images_in_memory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """M-DGSA's Figure 2, through smaller models: DGViT beside ViT, on the data set's first image."""
    write_images(name, tmp_path, monkeypatch)
    ours, vanilla = (
        str(ROOT / f'projects/dgsa/configs/{config}_1xb128-100e_{name}.py') for config in ('dgvit', 'vanilla/vit')
    )
    data = f'val_dataloader.dataset.data_root={tmp_path}'
    rows = draw('plot_rollout', ours, tmp_path / 'out', '--against', vanilla, UNTRAINED, '--cfg-options', data)
    assert len(rows) == 2 * 8 * 8 and len({row['model'] for row in rows}) == 2
    assert (tmp_path / 'out/rollout_val_0.png').exists()


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
    assert {row['model'] for row in rows} == {'mask2former (1)', 'mask2former (2)'}
    assert {row['query'] for row in rows} == {'0', '3'} and len(rows) == 2 * 2 * 8 * 8
    assert sum(float(row['relevance']) for row in rows) == pytest.approx(4, abs=1e-3)
    assert all(0 <= int(row['label']) < 6 and 0 < float(row['score']) < 1 for row in rows)


def test_agents_have_their_maps(configs: dict[str, str], tmp_path: Path) -> None:
    rows = draw('plot_agents', configs['agent'], tmp_path)
    assert [int(row['agent']) for row in rows] == list(range(9)) and all(0 < float(row['largest']) <= 1 for row in rows)


def test_cka_needs_images_of_one_size_and_says_how(configs: dict[str, str], tmp_path: Path, capsys: Any) -> None:
    """What the message says to set makes a square of each of four images."""
    for number, width in enumerate((64, 64, 64, 96)):
        image = np.random.default_rng(number).integers(0, 256, (64, width, 3), np.uint8)
        cv2.imwrite(str(tmp_path / f'{number}.png'), image)
    given = ['--images', str(tmp_path)]
    assert look('plot_cka', configs['pvt'], tmp_path / 'cka', *given) == 2
    setting = 'val_dataloader.dataset.pipeline.1.keep_ratio=False'
    assert f'by --cfg-options {setting}, for --images of test_dataloader' in capsys.readouterr().err
    rows = draw('plot_cka', configs['pvt'], tmp_path / 'cka', *given, '--cfg-options', setting.replace('val', 'test'))
    assert {round(float(row['cka']), 4) for row in rows if row['layer'] == row['other']} == {1.0}


def test_efficiency_of_two_backbones(configs: dict[str, str], tmp_path: Path) -> None:
    given = [configs['pvt'], configs['agent'], '--repetitions', '1', '--sizes', '32', '64', '--out', str(tmp_path)]
    for options, modes in ([], MODES[:1]), (['--modes', *reversed(MODES)], MODES):
        assert cli.main(tool('plot_efficiency').main, [*given, *options]) == 0
        rows = list(csv.DictReader((tmp_path / 'efficiency.csv').open()))
        found = [tuple(row[key] for key in ('mode', 'x', 'metric', 'provider')) for row in rows]
        assert found == list(product(modes, ('32_b1', '64_b1'), ('throughput', 'peak memory'), ('pvt', 'agent')))
        assert all(float(row['y_20']) <= float(row['y_50']) <= float(row['y_80']) for row in rows)
    assert (tmp_path / 'efficiency.png').stat().st_size > 5_000


def test_efficiency_beside_accuracies(configs: dict[str, str], tmp_path: Path, capsys: Any) -> None:
    """The panels that the papers have, what is measured in the figure, and what a file lacks in one message."""
    table = tmp_path / 'accuracies.csv'
    given = [configs['pvt'], configs['agent'], '--repetitions', '1', '--sizes', '32', '--out', str(tmp_path / 'out')]
    given += ['--accuracies', str(table)]
    table.write_text('config,accuracy\npvt,75.1\n')
    assert cli.main(tool('plot_efficiency').main, given) == 2
    assert 'has no accuracy of agent; add a row for each' in capsys.readouterr().err
    table.write_text('config,top1\npvt,75.1\n')
    assert cli.main(tool('plot_efficiency').main, given) == 2
    assert 'is no CSV file with columns config and accuracy' in capsys.readouterr().err

    saved = []
    table.write_text(f'config,accuracy,family\n{configs["pvt"]},75.1,tiny\nagent,78.4,tiny\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backbones, 'save', lambda figure, path: saved.append(figure) or path)
        assert cli.main(tool('plot_efficiency').main, given) == 0
    (figure,) = saved
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ['forward: peak memory', 'forward: throughput', 'forward: accuracy, 32 pixels']
    assert [line.get_ydata()[0] for line in figure.axes[2].lines[:2]] == [75.1, 78.4]
    assert sorted(figure.axes[2].lines[2].get_ydata()) == [75.1, 78.4]  # the family's


def test_efficiency_of_what_rules_gate(configs: dict[str, str], tmp_path: Path) -> None:
    rule = dict(type='SDPAGatedMultiheadAttention', path='backbone.layers.*.*.*.attn')
    (tmp_path / 'gated.py').write_text(
        f"_base_ = {configs['pvt']!r}\nmodel = dict(type='mmgate.Gated', host='mmdet.MaskRCNN', attention={rule!r})"
    )
    built = backbones.backbone(read_config(str(tmp_path / 'gated.py')))
    assert any(isinstance(module, SDPAGate) for module in built.modules())


def test_points_on_a_photograph(configs: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every offset is (2, -1) pixels of its level, so the points of the image's middle are known."""
    module, image, (height, width) = tool('plot_sampling_points'), tmp_path / 'photo.jpg', (427, 640)  # as COCO's are
    cv2.imwrite(str(image), np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))
    built = loading.load_models

    def known(*args: Any, **options: Any) -> Any:
        found = built(*args, **options)
        for attention in (layer.self_attn for layer in found[0].model.encoder.layers):
            nn.init.zeros_(attention.sampling_offsets.weight)
            attention.sampling_offsets.bias.data.view(-1, 2).copy_(torch.tensor([2.0, -1.0]))
        return found

    monkeypatch.setattr(loading, 'load_models', known)
    module.main([configs['detr'], UNTRAINED, '--images', str(image), '--part', 'encoder', '--out', str(tmp_path)])
    rows = list(csv.DictReader((tmp_path / f'sampling_points_{image.stem}.csv').open()))
    assert len(rows) == 8 * 4 * 4 and (tmp_path / f'sampling_points_{image.stem}.png').stat().st_size > 10_000
    scale = 128 / max(height, width)
    small = (int(width * scale + 0.5), int(height * scale + 0.5))  # what the model sees
    for row in rows:
        for axis, side, seen, offset in (('x', width, small[0], 2), ('y', height, small[1], -1)):
            finest = -(-seen // 8)
            cells = finest
            for _ in range(int(row['level'])):
                cells = -(-cells // 2)
            middle = (int(0.5 * finest) + 0.5) / finest
            assert float(row[axis]) == pytest.approx((middle + offset / cells) * side, abs=0.01)
    weights = np.array([float(row['weight']) for row in rows]).reshape(8, -1)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)


def test_one_level_of_a_decoder(configs: dict[str, str], tmp_path: Path, capsys: Any) -> None:
    arguments = ('plot_sampling_points', configs['detr'])
    rows = draw(*arguments, tmp_path / 'level', '--level', '1', '--queries', '5', '2')
    assert {row['level'] for row in rows} == {'1'} and len(rows) == 2 * 8 * 4
    assert {row['query'] for row in rows} == {'5', '2'}
    assert look(*arguments, tmp_path, '--level', '9') == look(*arguments, tmp_path, '--layer', '5') == 2
    said = capsys.readouterr().err
    assert '--layer 5: the decoder has 2 layers' in said and 'the model has levels 0 to 3' in said


def test_the_difference_that_gates_make(
    configs: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Gates at their identity change nothing; drawn ones move weight between the points of a head, and no more."""
    arguments = ('plot_sampling_points', configs['detr'])
    rows = draw(*arguments, tmp_path / 'identity', '--difference', '--top-k', '2')
    assert len(rows) == 2 * 8 * 4 * 4 and {float(row['change']) for row in rows} == {0}
    assert '0.00% of the attention moved' in capsys.readouterr().out

    module = tool('plot_sampling_points')
    built = loading.load_models

    def drawn(*args: Any, **options: Any) -> Any:
        found = built(*args, **options)
        for loaded in found:
            # Logits start at 0, where a factor changes nothing.
            torch.manual_seed(0)
            for name, parameter in loaded.model.named_parameters():
                if 'attention_weights' in name:
                    nn.init.normal_(parameter, std=0.5)
        for parameter in mmgate.gate_parameters(found[0].model).values():
            nn.init.normal_(parameter, std=0.5)
        return found

    monkeypatch.setattr(loading, 'load_models', drawn)
    options = ['--max-images', '1', '--difference', '--queries', '3']
    tables = []
    for name, against in (('alone', []), ('pair', ['--against', configs['detr'], UNTRAINED])):
        module.main([configs['detr'], UNTRAINED, *options, *against, '--out', str(tmp_path / name)])
        (table,) = (tmp_path / name).glob('*.csv')
        rows = list(csv.DictReader(table.open()))
        changes = np.array([float(row['change']) for row in rows]).reshape(8, 16)
        assert np.abs(changes).max() > 0.01 and {row['query'] for row in rows} == {'3'}
        np.testing.assert_allclose(changes.sum(-1), 0, atol=1e-4)
        tables.append([[float(row[key]) for key in ('weight', 'weight_before', 'x_before')] for row in rows])
    # Gates that are switched off leave the model that has them at their identity.
    np.testing.assert_allclose(*tables, atol=1e-4)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (['--difference'], 'has no gates to switch off; give --against CONFIG CHECKPOINT'),
        (['--difference', *['--against', 'detr', UNTRAINED] * 2], '--difference is of two models'),
    ],
)
def test_a_difference_is_of_gates_or_of_two_models(
    options: list[str], message: str, configs: dict[str, str], tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / 'vanilla.py').write_text(over_shapes(VANILLA_DETR, Path(configs['detr']).parent / 'shapes'))
    given = [configs.get(option, option) for option in options]
    assert look('plot_sampling_points', str(tmp_path / 'vanilla.py'), tmp_path / 'out', *given) == 2
    assert message in capsys.readouterr().err


def test_a_window_that_slides_is_not_taken_for_the_image(configs: dict[str, str], tmp_path: Path) -> None:
    """With windows the reading would be of the last of them alone."""
    slide = ['model.test_cfg.mode=slide', 'model.test_cfg.crop_size=(32,32)', 'model.test_cfg.stride=(32,32)']
    arguments = ('plot_rollout', configs['mask2former'])
    whole = draw(*arguments, tmp_path / 'whole', '--queries', '0')
    assert draw(*arguments, tmp_path / 'slide', '--queries', '0', '--cfg-options', *slide) == whole


def test_images_are_not_flipped_and_true_boxes_lie_on_them(configs: dict[str, str], tmp_path: Path) -> None:
    """Whether a pipeline loads annotations before the resize or after it, boxes are in pixels of the file."""
    cfg, changed = Config.fromfile(configs['detr']), str(tmp_path / 'changed.py')
    pipeline = cfg.val_dataloader.dataset.pipeline
    read, resize, annotations, pack = pipeline
    args = drawing_parser('').parse_args([changed, UNTRAINED, '--out', str(tmp_path), '--max-images', '1'])
    truths = []
    for steps in ([read, resize, annotations], [read, annotations, resize, dict(type='RandomFlip', prob=1.0)]):
        pipeline[:] = [*steps, pack]
        cfg.dump(changed)
        (loaded,) = load_models(args, ['locations'], 'This')
        (batch,) = loaded.inputs(args)
        (sample,) = batch['data_samples']
        truths.append(get_box_tensor(sample.gt_instances.bboxes))
        assert not sample.get('flip') and sample.scale_factor == (2.0, 2.0)
    assert truths[0].tolist() == truths[1].tolist() and len(truths[0]) and truths[0].max() <= 64


@pytest.mark.parametrize(
    ('name', 'options', 'message'),
    [
        ('plot_gates', ['--out', 'file'], 'nothing can be written to file'),
        ('plot_gates', ['--max-images', '0'], '0: give 1 or more'),
        ('plot_gates', ['--images', 'nowhere'], 'nowhere is no image, no folder with images'),
        ('plot_rollout', ['--part', 'image'], 'no self-attention over the image'),
        ('plot_rollout', ['--part', 'queries'], 'no decoder attends densely'),
        ('plot_sampling_points', ['--against', 'pvt', UNTRAINED], 'pvt: A picture of sampling points needs'),
        ('plot_sampling_points', ['--difference', '--level', '1'], '--difference is of a decoder on all levels'),
        ('plot_sampling_points', ['--pixel', '3', '3', '--part', 'decoder'], 'chooses a query of the encoder'),
        ('plot_sampling_points', ['--pixel', '64', '3'], 'the pixel (64, 3) lies outside of the image of 64 x 64'),
    ],
    ids=lambda x: ' '.join(x) if isinstance(x, list) else '',
)
def test_refused_in_one_message(
    name: str, options: list[str], message: str, configs: dict[str, str], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path('file').write_text('')
    try:
        code: Any = look(name, configs['detr'], tmp_path, *(configs.get(option, option) for option in options))
    except SystemExit as error:  # argparse's own
        code = error.code
    assert code == 2 and message in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == ['file']
