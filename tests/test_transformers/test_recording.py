"""Gates and sampling points recorded from transformers' models, and drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip('transformers', '5.20', reason='needs transformers: the extra "transformers"')

from helpers.hub_models import build, feed, largest_difference, moved, outputs

import mmgate
from mmgate.analysis.probes.gates import gate_statistics
from mmgate.analysis.probes.recording import record
from mmgate.analysis.probes.sampling import ImageSample, chosen_points, layers_of, record_sampling

PLUG = 'PLuGMultiScaleDeformableAttention'


UNEVEN = dict(decoder_n_points=[3, 6, 3])
# by model and options, the number of its deformable attentions
SAMPLING = [
    ('deformable_detr', {}, 4),
    ('rt_detr', {}, 2),
    ('rt_detr_v2', {}, 2),
    ('mask2former', {}, 2),
    ('d_fine', {}, 2),
    ('d_fine', UNEVEN, 2),
    ('deimv2', UNEVEN, 2),
]


def noted(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Return a dict to which each deformable attention's arguments of transformers' own sampler are added."""
    seen: dict[str, tuple[Any, ...]] = {}
    for path, module in model.named_modules():
        if hasattr(module, 'ms_deformable_attn_core'):
            core = module.ms_deformable_attn_core

            def note(*args: Any, path: str = path, core: Any = core) -> Tensor:
                seen[path] = args
                return core(*args)

            module.ms_deformable_attn_core = note
        elif hasattr(module, 'sampling_offsets') and hasattr(module, 'attn'):
            module.attn.register_forward_pre_hook(lambda _, args, path=path: seen.update({path: args}))
    return seen


@pytest.mark.parametrize('gated', [False, True])
@pytest.mark.parametrize('name, options, count', SAMPLING, ids=str)
def test_sampling_points_are_recorded(name: str, options: dict[str, Any], count: int, gated: bool) -> None:
    """Locations and weights are those that transformers' own sampler is given, by level where they differ in points."""
    vanilla, model, fed = build(name, **options), build(name, **options), feed(name)
    seen = noted(vanilla)
    outputs(vanilla, fed)
    if gated:
        mmgate.swap_attention(model, dict(path='**', type=PLUG))
    with record_sampling(model) as recording, torch.no_grad():
        model(**fed)
    layers = {path: found for path, found in recording.items() if 'locations' in found}
    assert len(layers) == count and all('gate' in found for found in layers.values()) == gated
    for path, args in seen.items():
        found = layers[path]
        by_core = name in ('d_fine', 'deimv2')
        locations, weights = args[2:4] if by_core else args[-3:-1]
        for actual, expected in ((found['locations'], locations), (found['weights'], weights)):
            torch.testing.assert_close(actual.last.flatten(), expected.flatten(), rtol=1e-4, atol=1e-5)
        if by_core:
            assert found['num_points'].last.tolist() == list(args[4])
    if name == 'deformable_detr':
        assert [len(layers_of(recording, part)) for part in ('encoder', 'decoder')] == [2, 2]


def test_statistics_and_maps_of_gates_on_levels_with_different_numbers_of_points() -> None:
    """The map has the mean over the points of each level."""
    model = build('d_fine', decoder_n_points=[3, 6, 3])
    mmgate.swap_attention(model, dict(path='**', type=PLUG, granularity='head_level_point'))
    moved(model)
    model.test_step = lambda batch: [model(**batch)]
    with record(model, ('gate',)) as recording:
        outputs(model, feed('d_fine'))
    for gate in gate_statistics(model, [feed('d_fine')]):
        read = recording[gate.path]['gate'].last  # (B, Q, H, N)
        expected = torch.stack([part.mean((0, 1, 3)) for part in read.split([3, 6, 3], 3)], 1)
        assert gate.coefficients is not None and expected.std() > 0
        torch.testing.assert_close(torch.from_numpy(gate.coefficients).float(), expected, rtol=1e-4, atol=1e-5)
        assert gate.statistics.count == read.numel()


@pytest.mark.parametrize('level', [None, 1])
def test_sampling_points_of_levels_with_different_numbers_are_drawn(level: int | None, tmp_path: Path) -> None:
    """No point that is not there is in the table of points or in the picture."""
    pytest.importorskip('matplotlib', reason='needs matplotlib')
    from PIL import Image

    from mmgate.analysis.figures.sampling import draw_sampling

    pixels = np.random.default_rng(0).integers(0, 255, (128, 128, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / 'image.png')
    sample = ImageSample(str(tmp_path / 'image.png'), (128, 128), (64, 64), (64, 64))
    model = build('d_fine', decoder_n_points=[3, 6, 3])
    with record_sampling(model) as recording, torch.no_grad():
        model(**feed('d_fine'))
    points = chosen_points(recording, sample, part='decoder', queries=[0, 3], level=level)
    counts = [3, 6, 3] if level is None else [3, 6, 3][level : level + 1]
    rows = [*points.rows()]
    assert len(rows) == 2 * 4 * sum(counts) and points.there.sum(1).tolist() == counts
    assert all(np.isfinite([row['x'], row['y'], row['weight']]).all() for row in rows)
    if level is None:
        assert abs(sum(row['weight'] for row in rows) - 8) < 1e-4  # of two queries and four heads
        read = recording[points.path]['locations'].last[0, 3, 1]  # (N, 2) of query 3 and head 1
        of_one = [(row['x'], row['y']) for row in rows if row['query'] == 3 and row['head'] == 1]
        np.testing.assert_allclose(of_one, 128 * read.numpy(), rtol=1e-4, atol=1e-3)
    picture = draw_sampling([('D-FINE', points, sample)], tmp_path / 'points.png')
    assert np.asarray(Image.open(picture)).std() > 10


def test_gates_and_weights_of_dense_attention() -> None:
    model, fed = build('detr'), feed('detr')
    vanilla = build('detr')
    vanilla.set_attn_implementation('eager')
    weights = vanilla(**fed, output_attentions=True).encoder_attentions
    mmgate.swap_attention(model, dict(path='**.encoder.layers.*.self_attn', type='PLuGMultiheadAttention'))
    before = outputs(model, fed)
    with record(model, 'gate'):
        assert largest_difference(before, outputs(model, fed)) == 0
    with record(model, ('gate', 'attention')) as recording:
        assert largest_difference(before, outputs(model, fed)) < 1e-5  # the decoder's attention is vanilla
    gated = {path: found for path, found in recording.items() if 'gate' in found}
    assert [*gated] == [f'model.encoder.layers.{i}.self_attn' for i in range(2)] and len(recording) == 6
    for found, expected in zip(gated.values(), weights, strict=True):
        torch.testing.assert_close(found['attention'].last, expected, rtol=1e-4, atol=1e-6)
        assert found['gate'].last.shape == (2, 1, 6, 6)


def test_vanilla_attention_of_the_interface_is_recorded() -> None:
    """Also where it returns its weights, which stay what it returns, and leaves its config."""
    for weights in ({}, dict(output_attentions=True)):
        model, fed = build('detr'), feed('detr')
        if weights:
            model.set_attn_implementation('eager')
        expected = outputs(model, {**fed, **weights})
        configs = {id(module.config) for module in model.modules() if hasattr(module, 'config')}
        with record(model, 'attention') as recording, torch.no_grad():
            found = outputs(model, {**fed, **weights})
            returned = model(**fed, **weights)
        assert configs == {id(module.config) for module in model.modules() if hasattr(module, 'config')}
        assert largest_difference(expected, found) < 1e-5
        maps = [recording[f'model.encoder.layers.{i}.self_attn']['attention'].last for i in range(2)]
        assert [len(of['attention'].tensors) for of in recording.values()] == [2] * 6
        if weights:
            assert all(torch.equal(*pair) for pair in zip(maps, returned.encoder_attentions, strict=True))
