"""Rollout through a decoder's queries, on cases that are known by hand and in DETRs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from mmengine.hub import get_config
from mmengine.registry import MODELS, init_default_scope
from torch import Tensor

import mmgate
from mmgate.analysis.complexity import empty_sample
from mmgate.analysis.probes.recording import predicted
from mmgate.analysis.probes.relevance import add_levels, query_relevance, query_rollout, record_maps
from mmgate.errors import ConfigError

Q, COARSE, FINE = 3, 4, 6


def attention(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).softmax(-1)


def test_it_is_the_rollout_of_queries_and_image_in_one_sequence() -> None:
    """Self- and cross-attention over two levels, written out as square maps whose image rows are the identity."""
    shapes = ((COARSE, COARSE), (None, Q), (FINE, FINE), (None, Q))
    steps = [(memory, attention(Q, keys)) for memory, keys in shapes]
    identity = torch.eye(Q + COARSE + FINE, dtype=torch.float64)
    expected = identity
    for memory, weights in steps:
        square, start = identity.clone(), {None: 0, COARSE: Q, FINE: Q + COARSE}[memory]
        square[:Q] = 0
        square[:Q, start : start + weights.shape[1]] = weights
        expected = 0.5 * (square + identity) @ expected
    image = query_rollout(steps, [2, 0])
    torch.testing.assert_close(torch.cat([image[COARSE], image[FINE]], 1), expected[[2, 0], Q:])


def test_levels_add_up_with_their_shares() -> None:
    coarse, fine = torch.tensor([[0.3, 0.0]]), torch.zeros(1, 8)
    fine[0, 7] = 0.5
    found = add_levels({(1, 2): coarse, (2, 4): fine})
    assert found.shape == (1, 2, 4)
    torch.testing.assert_close(found.sum(), torch.tensor(0.8))
    torch.testing.assert_close(found[0, 1, 3], torch.tensor(0.5))
    assert found[0, :, 0].sum() > found[0, :, 2].sum()  # the coarse level's left half


def detr(config: str) -> Any:
    cfg = get_config(f'mmdet::{config}')
    init_default_scope('mmdet')
    model = cfg.model
    model.backbone.update(depth=18, init_cfg=None)
    model.neck.in_channels = [512]
    for part in (model.encoder, model.decoder):
        part.num_layers = 2
    model.num_queries, model.test_cfg.max_per_img = 8, 8
    torch.manual_seed(0)
    built = MODELS.build(model)
    built.init_weights()
    return built.eval()


@pytest.mark.parametrize('gated', [False, True], ids=['vanilla', 'gated'])
@pytest.mark.parametrize(
    'config',
    ['detr/detr_r18_8xb2-500e_coco.py', 'conditional_detr/conditional-detr_r50_8xb2-50e_coco.py'],
    ids=['detr', 'conditional'],
)
def test_queries_of_detrs(config: str, gated: bool) -> None:
    """Boxes and scores are the head's; a cross-attention to one place, rolled back through the encoder, is its row."""
    model = detr(config)
    if gated:
        mmgate.swap_attention(model, dict(path=['encoder.**', 'decoder.**'], type='PLuGMultiheadAttention'))
    size, queries = (64, 96), [5, 2]
    with record_maps(model) as found, torch.no_grad():
        model(torch.randn(1, 3, *size), [empty_sample(size)], mode='predict')
    result = query_relevance(found, size, queries)
    scores, boxes = predicted(found)
    for number, query in zip(queries, result, strict=True):
        assert query.number == number and query.score == pytest.approx(float(scores[0, number].max()))
        assert query.relevance.shape == (2, 3) and query.relevance.sum() == pytest.approx(1)
        np.testing.assert_array_equal(query.place, boxes[0, number])
    with pytest.raises(ConfigError, match='the queries 8 have to lie in 0 to 7'):
        query_relevance(found, size, [8])
