"""The tools that draw: each writes a picture and its numbers, of models and images as they are, or refuses at once."""

from __future__ import annotations

import csv
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import ROOT, needs_mmpretrain, over_shapes, run_python, tool
from mmdet.structures.bbox import get_box_tensor
from mmengine.config import Config
from mmengine.structures import BaseDataElement
from shapes import write_shapes
from torch import nn

import mmgate
from mmgate.analysis.arguments import drawing_parser
from mmgate.analysis.figures.maps import seen_part
from mmgate.analysis.loading import UNTRAINED, load_model, load_models
from mmgate.benchmarks import backbones
from mmgate.benchmarks.measure import MODES
from mmgate.mm import cli

CONFIGS = dict(
    vanilla='_base_/deformable-detr-refine_r18_1xb8-12e_shapes.py',
    detr='plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py',
    mask2former='plug/mask2former/plug-mask2former_r18_1xb8-1k_shapes-128x128.py',
    pvt='vanilla/mask_rcnn/mask-rcnn_pvt-demo_1xb8-8e_shapes.py',
    agent='agent/mask_rcnn/agent-mask-rcnn_pvt-demo_1xb8-8e_shapes.py',
    saga='saga/mask_rcnn/saga-mask-rcnn_swin-demo_1xb8-8e_shapes.py',
)


@pytest.fixture(scope='module')
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The demos' configs over one small image."""
    root = tmp_path_factory.mktemp('looks')
    write_shapes(root / 'shapes', num_train=1, num_val=1, size=64)
    for name, config in CONFIGS.items():
        (root / f'{name}.py').write_text(over_shapes(f'configs/{config}', root / 'shapes'))
    return {name: str(root / f'{name}.py') for name in CONFIGS}


def look(name: str, config: str, out: Path, *options: str, checkpoint: str = UNTRAINED) -> int:
    """Run a tool on one image and return its exit status."""
    return cli.main(tool(name).main, [config, checkpoint, '--max-images', '1', '--out', str(out), *options])


def draw(name: str, config: str, out: Path, *options: str, checkpoint: str = UNTRAINED) -> list[dict[str, str]]:
    """Run a tool and return the rows of its CSV."""
    assert look(name, config, out, *options, checkpoint=checkpoint) == 0
    (picture,) = out.glob('*.png')
    assert picture.stat().st_size > 5_000
    return list(csv.DictReader(picture.with_suffix('.csv').open()))


def numbers(rows: list[dict[str, str]], *keys: str) -> np.ndarray:
    """Return columns of rows, ``(rows, columns)``."""
    return np.array([[float(row[key]) for key in keys] for row in rows])


def write_noise(folder: Path, *widths: int, height: int) -> list[str]:
    """Write an image of random pixels for each width, and return the options by which a tool takes them."""
    for number, width in enumerate(widths):
        image = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
        cv2.imwrite(str(folder / f'{number}.png'), image)
    return ['--images', *(str(folder / f'{number}.png') for number in range(len(widths)))]


def checkpoint(config: str, path: Path, change: Callable[[nn.Module], None]) -> str:
    """Write a checkpoint of a config's model after a change of its parameters, and return its path."""
    model = load_model(Config.fromfile(config), UNTRAINED).model
    with torch.no_grad():
        change(model)
    torch.save(dict(state_dict=model.state_dict()), path)
    return str(path)


def test_gates_and_ranks(configs: dict[str, str], tmp_path: Path) -> None:
    """Identity gates are zero; SAGA's start around a half, and its ranks stay below the channels."""
    rows = draw('plot_gates', configs['detr'], tmp_path / 'identity')
    assert rows and not numbers(rows, 'mean', 'std', 'minimum', 'maximum').any()
    means = {row['gate']: float(row['mean']) for row in draw('plot_gates', configs['saga'], tmp_path / 'gates')}
    assert means['gate_k'] == pytest.approx(0.5, abs=0.05) and means['gate_out'] == pytest.approx(0, abs=0.1)
    others = ['--against', configs['saga'], UNTRAINED]
    rows = draw('plot_kv_rank', configs['saga'], tmp_path / 'rank', *others, *others)
    assert {row['model'] for row in rows} == {'saga (1)', 'saga (2)', 'saga (3)'}
    ranks = numbers(rows, 'effective_rank', 'matrix_rank', 'channels')
    assert (ranks >= 1).all() and (np.diff(ranks) >= 0).all()


def test_sinks_lie_above_uniform(configs: dict[str, str], tmp_path: Path) -> None:
    rows = draw('plot_attention_sink', configs['mask2former'], tmp_path, '--against', configs['pvt'], UNTRAINED)
    assert {row['model'] for row in rows} == {'mask2former', 'pvt'}
    assert (np.diff(numbers(rows, 'uniform', 'sink_share', 'largest_head_share')) >= 0).all()
    assert 'layers.0.cross_attn' in rows[0]['layer'] and 'layers.0.self_attn' in rows[1]['layer']  # as they run
    assert (numbers(rows, 'maximum_activation') > 0).all()


@pytest.mark.parametrize('model', ['pvt', 'agent', 'saga'])
def test_relevance_of_a_rollout_sums_to_one(model: str, configs: dict[str, str], tmp_path: Path) -> None:
    """Through PVT's reductions, agents, and the windows of the last stage of a SAGA-Swin."""
    assert numbers(draw('plot_rollout', configs[model], tmp_path), 'relevance').sum() == pytest.approx(1, abs=1e-3)


def test_agents_have_their_maps(configs: dict[str, str], tmp_path: Path) -> None:
    rows = draw('plot_agents', configs['agent'], tmp_path)
    assert [row['agent'] for row in rows] == [*'012345678']
    assert (numbers(rows, 'largest') > 0).all() and (numbers(rows, 'largest') <= 1).all()


@needs_mmpretrain
def test_classifiers_have_a_first_token_and_heads(tmp_path: Path) -> None:
    """Gated attention's ViT beside M-DGSA's, whose heads inhibit."""
    given = write_noise(tmp_path, 32, height=32)
    gated = str(ROOT / 'configs/sdpa_gate/classification/sdpa-gate-vit_1xb64-40e_digits.py')
    signed = str(ROOT / 'projects/dgsa/configs/dgvit_1xb64-40e_digits.py')
    for row in draw('plot_attention_sink', gated, tmp_path / 'sink', *given):
        assert float(row['sink_share']) >= float(row['first_token_share']) > 0
        assert float(row['maximum_activation']) >= float(row['first_token_activation']) > 0
    heads = ['--part', 'heads', '--layer', '1', '--against', gated, UNTRAINED, *given]
    values = numbers(draw('plot_rollout', signed, tmp_path / 'heads', *heads), 'attention')
    assert len(values) == 2 * 4 * 16 and values[:64].min() < 0 < values[64:].min()
    for options in ([], ['--absolute']):
        rows = draw('plot_rollout', signed, tmp_path / f'rollout{len(options)}', *given, *options)
        values = numbers(rows, 'relevance')
        assert np.abs(values).sum() == pytest.approx(1, abs=1e-3) and (values.min() < 0) == (not options)


def test_a_picture_shows_what_the_model_sees() -> None:
    """Classifiers resize the shorter side and crop to the middle."""
    sample = BaseDataElement(metainfo=dict(img_shape=(4, 4), scale_factor=(0.5, 0.5)))
    picture = np.arange(8 * 12).reshape(8, 12)
    np.testing.assert_array_equal(seen_part(picture, sample), picture[:, 2:10])
    sample.set_metainfo(dict(img_shape=(4, 6)))
    assert seen_part(picture, sample).shape == (8, 12)


def test_cka_needs_images_of_one_size_and_says_how(configs: dict[str, str], tmp_path: Path, capsys: Any) -> None:
    """What the message says to set makes a square of each of four images."""
    write_noise(tmp_path, 64, 64, 64, 96, height=64)
    given = ['--images', str(tmp_path)]
    assert look('plot_cka', configs['pvt'], tmp_path / 'cka', *given) == 2
    setting = 'val_dataloader.dataset.pipeline.1.keep_ratio=False'
    assert f'by --cfg-options {setting}, for --images of test_dataloader' in capsys.readouterr().err
    rows = draw('plot_cka', configs['pvt'], tmp_path / 'cka', *given, '--cfg-options', setting.replace('val', 'test'))
    assert {round(float(row['cka']), 4) for row in rows if row['layer'] == row['other']} == {1.0}


def test_efficiency_of_gated_backbones_beside_accuracies(
    configs: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """And what a file of accuracies lacks in one message."""
    table = tmp_path / 'accuracies.csv'
    gate = ['--gate', 'backbone.layers.*.*.*.attn=SDPAGatedMultiheadAttention']
    given = [configs['pvt'], *gate, '--repetitions', '1', '--sizes', '32', '64', '--accuracies', str(table)]
    given += ['--modes', *reversed(MODES), '--out', str(tmp_path)]
    for text, message in (
        ('config,accuracy\npvt,75.1\n', 'has no accuracy of pvt, gated; add a row for each'),
        ('config,top1\npvt,75.1\n', 'is no CSV file with columns config and accuracy'),
    ):
        table.write_text(text)
        assert cli.main(tool('plot_efficiency').main, given) == 2 and message in capsys.readouterr().err
    gated: list[bool] = []
    build = backbones.backbone

    def built(cfg: Config) -> nn.Module:
        model = build(cfg)
        gated.append(bool(mmgate.gate_parameters(model)))
        return model

    monkeypatch.setattr(backbones, 'backbone', built)
    table.write_text(f'config,accuracy,family\n{configs["pvt"]},75.1,tiny\n"pvt, gated",78.4,tiny\n')
    assert cli.main(tool('plot_efficiency').main, given) == 0 and set(gated) == {False, True}
    rows = list(csv.DictReader((tmp_path / 'efficiency.csv').open()))
    found = [tuple(row[key] for key in ('mode', 'x', 'metric', 'provider')) for row in rows]
    assert found == list(product(MODES, ('32_b1', '64_b1'), ('throughput', 'peak memory'), ('pvt', 'pvt, gated')))
    assert (np.diff(numbers(rows, 'y_20', 'y_50', 'y_80')) >= 0).all()
    assert (tmp_path / 'efficiency.png').stat().st_size > 10_000


def test_points_on_a_photograph(configs: dict[str, str], tmp_path: Path) -> None:
    """Every offset is (2, -1) pixels of its level, so the points of the image's middle are known."""
    height, width = (427, 640)  # as COCO's are

    def move(model: nn.Module) -> None:
        for layer in model.encoder.layers:
            nn.init.zeros_(layer.self_attn.sampling_offsets.weight)
            layer.self_attn.sampling_offsets.bias.view(-1, 2).copy_(torch.tensor([2.0, -1.0]))

    weights = checkpoint(configs['detr'], tmp_path / 'moved.pth', move)
    options = [*write_noise(tmp_path, width, height=height), '--part', 'encoder']
    rows = draw('plot_sampling_points', configs['detr'], tmp_path / 'out', *options, checkpoint=weights)
    assert len(rows) == 8 * 4 * 4
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
    np.testing.assert_allclose(numbers(rows, 'weight').reshape(8, -1).sum(-1), 1, atol=1e-5)


def test_one_level_of_a_decoder(configs: dict[str, str], tmp_path: Path) -> None:
    arguments = ('plot_sampling_points', configs['detr'])
    rows = draw(*arguments, tmp_path / 'level', '--level', '1', '--queries', '5', '2')
    assert {row['level'] for row in rows} == {'1'} and len(rows) == 2 * 8 * 4
    assert {row['query'] for row in rows} == {'5', '2'}


def test_the_difference_that_gates_make(configs: dict[str, str], tmp_path: Path, capsys: Any) -> None:
    """Gates at their identity change nothing; drawn ones move weight between the points of a head, and no more."""
    arguments = ('plot_sampling_points', configs['detr'])
    rows = draw(*arguments, tmp_path / 'identity', '--difference', '--top-k', '2')
    assert len(rows) == 2 * 8 * 4 * 4 and not numbers(rows, 'change').any()
    assert '0.00% of the attention moved' in capsys.readouterr().out

    def set_logits(model: nn.Module, gates: float = 0.0) -> None:
        """They start at 0, where a factor changes nothing."""
        torch.manual_seed(0)
        for layer in model.decoder.layers:
            nn.init.normal_(layer.cross_attn.attention_weights.weight, std=0.5)
        for parameter in mmgate.gate_parameters(model).values() if gates else ():
            nn.init.normal_(parameter, std=gates)

    identity = checkpoint(configs['detr'], tmp_path / 'identity.pth', set_logits)
    drawn = checkpoint(configs['detr'], tmp_path / 'drawn.pth', partial(set_logits, gates=0.5))
    tables = []
    for name, against in (('alone', []), ('pair', ['--against', configs['detr'], identity])):
        options = ['--difference', '--queries', '3', *against]
        rows = draw(*arguments, tmp_path / name, *options, checkpoint=drawn)
        changes = numbers(rows, 'change').reshape(8, 16)
        assert np.abs(changes).max() > 0.01 and {row['query'] for row in rows} == {'3'}
        np.testing.assert_allclose(changes.sum(-1), 0, atol=1e-4)
        tables.append(numbers(rows, 'weight', 'weight_before', 'x_before'))
    # Gates that are switched off leave the model that has them at their identity.
    np.testing.assert_allclose(*tables, atol=1e-4)


def test_a_window_that_slides_is_not_taken_for_the_image(configs: dict[str, str], tmp_path: Path) -> None:
    """With windows the reading would be of the last of them alone."""
    slide = ['model.test_cfg.mode=slide', 'model.test_cfg.crop_size=(32,32)', 'model.test_cfg.stride=(32,32)']
    arguments = ('plot_attention_sink', configs['mask2former'])
    whole = draw(*arguments, tmp_path / 'whole')
    assert draw(*arguments, tmp_path / 'slide', '--cfg-options', *slide) == whole


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
        ('plot_gates', ['vanilla'], 'needs a model with gates (plot_gates.py); DeformableDETR has '),
        ('plot_agents', [], 'needs a model with agent tokens (plot_agents.py); DeformableDETR has '),
        ('plot_rollout', [], 'no self-attention over the image'),
        ('plot_sampling_points', ['--against', 'pvt', UNTRAINED], 'pvt: A picture of sampling points needs'),
        ('plot_sampling_points', ['--level', '9'], 'the model has levels 0 to 3'),
        ('plot_sampling_points', ['--layer', '5'], '--layer 5: the decoder has 2 layers'),
        ('plot_sampling_points', ['--difference', *['--against', 'detr', UNTRAINED] * 2], 'is of two models'),
        ('plot_sampling_points', ['vanilla', '--difference'], 'has no gates to switch off'),
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
    first = 'vanilla' if 'vanilla' in options else 'detr'
    given = [configs.get(option, option) for option in options if option != 'vanilla']
    try:
        code: Any = look(name, configs[first], tmp_path, *given)
    except SystemExit as error:  # argparse's own
        code = error.code
    assert code == 2 and message in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == ['file']


def test_help_is_printed_before_torch_is_imported() -> None:
    """It takes half a second instead of several."""
    folders = ('analysis_tools', 'dataset_converters', 'deploy', 'model_converters')
    tools = [str(path) for folder in folders for path in sorted((ROOT / 'tools' / folder).glob('*.py'))]
    names = [name for name in tools if '__main__' in Path(name).read_text()]
    code = """
import runpy, sys
sys.path[:0] = ['tools/analysis_tools', 'tools/dataset_converters']
for name in sys.argv[1:]:
    sys.argv = [name, '--help']
    try:
        runpy.run_path(name, run_name='__main__')
    except SystemExit as error:
        print(name, error.code, file=sys.stderr)
print({'torch', 'mmdet', 'mmcv', 'matplotlib'} & {*sys.modules}, file=sys.stderr)
"""
    said = run_python('-c', code, *names, cwd=ROOT).stderr.splitlines()
    assert said == [*(f'{name} 0' for name in names), 'set()']
