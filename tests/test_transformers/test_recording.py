"""Gates and sampling points recorded from transformers' models, and drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip('transformers', '5.20', reason='needs transformers: the extra "transformers"')

from helpers.hub_models import build, feed, largest_difference, moved, outputs

import mmgate
from mmgate.analysis.probes.gates import gate_statistics
from mmgate.analysis.probes.recording import record
from mmgate.analysis.probes.sampling import ImageSample, chosen_points, record_sampling

PLUG = 'PLuGMultiScaleDeformableAttention'

UNEVEN = dict(decoder_n_points=[3, 6, 3])  # as D-FINE is published


def test_statistics_and_maps_of_gates_on_levels_with_different_numbers_of_points() -> None:
    """The map has the mean over the points of each level."""
    model = build('d_fine', **UNEVEN)
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


def test_sampling_points_of_levels_with_different_numbers_are_read_and_drawn(tmp_path: Path) -> None:
    """No point that is not there is in the table of points or in the picture."""
    pytest.importorskip('matplotlib', reason='needs matplotlib')
    from PIL import Image

    from mmgate.analysis.figures.sampling import draw_sampling

    pixels = np.random.default_rng(0).integers(0, 255, (128, 128, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / 'image.png')
    sample = ImageSample(str(tmp_path / 'image.png'), (128, 128), (64, 64), (64, 64))
    model = build('d_fine', **UNEVEN)
    with record_sampling(model) as recording, torch.no_grad():
        model(**feed('d_fine'))
    for level, counts in ((1, [6]), (None, [3, 6, 3])):
        points = chosen_points(recording, sample, part='decoder', queries=[0, 3], level=level)
        rows = [*points.rows()]
        assert len(rows) == 2 * 4 * sum(counts) and points.there.sum(1).tolist() == counts
        assert all(np.isfinite([row['x'], row['y'], row['weight']]).all() for row in rows)
        picture = draw_sampling([('D-FINE', points, sample)], tmp_path / 'points.png')
        assert np.asarray(Image.open(picture)).std() > 10
    assert abs(sum(row['weight'] for row in rows) - 8) < 1e-4  # of two queries and four heads
    read = recording[points.path]['locations'].last[0, 3, 1]  # (N, 2) of query 3 and head 1
    of_one = [(row['x'], row['y']) for row in rows if row['query'] == 3 and row['head'] == 1]
    np.testing.assert_allclose(of_one, 128 * read.numpy(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize('attention', ['gated', 'sdpa', 'eager'])
def test_dense_attention_is_recorded(attention: str) -> None:
    """Also where it returns its weights, which stay what it returns, and leaves its config."""
    eager, fed = build('detr'), feed('detr')
    eager.set_attn_implementation('eager')
    expected = eager(**fed, output_attentions=True).encoder_attentions
    model = eager if attention == 'eager' else build('detr')
    if attention == 'eager':
        fed['output_attentions'] = True
    if attention == 'gated':
        mmgate.swap_attention(model, dict(path='**.encoder.layers.*.self_attn', type='PLuGMultiheadAttention'))
    before = outputs(model, fed)
    configs = {id(vars(module)['config']) for module in model.modules() if 'config' in vars(module)}
    with record(model, ('gate', 'attention')) as recording:
        assert largest_difference(before, outputs(model, fed)) < 1e-5
    assert configs == {id(vars(module)['config']) for module in model.modules() if 'config' in vars(module)}
    assert [len(found['attention'].tensors) for found in recording.values()] == [1] * 6
    for number, weights in enumerate(expected):
        found = recording[f'model.encoder.layers.{number}.self_attn']
        torch.testing.assert_close(found['attention'].last, weights, rtol=1e-4, atol=1e-6)
        assert 'gate' not in found if attention != 'gated' else found['gate'].last.shape == (2, 1, 6, 6)
