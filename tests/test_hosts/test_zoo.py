"""One config of every architecture in the zoos that a gate fits: built, gated, compared with itself, and trained."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
import zoo
from torch import Tensor
from zoo import ZOO

pytestmark = pytest.mark.slow
TRAINED = ('dino', 'grounding_dino', 'segformer', 'beit', 'conditional_detr', 'segmenter')
UNGATED = ('dino', 'mask2former')


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger('mmengine')
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


def assert_close(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Compare with the largest value of each output, or with 1."""
    assert len(actual) == len(expected) > 0
    for a, e in zip(actual, expected, strict=True):
        assert e.isfinite().all()
        torch.testing.assert_close(a, e, rtol=0, atol=tolerance * max(1.0, e.abs().max().item()))


@pytest.mark.parametrize('name', ZOO)
def test_identity_start(name: str) -> None:
    config, count, mode = ZOO[name]
    cfg = zoo.reduced(config)
    model, data = zoo.build(cfg), zoo.batch(cfg)
    expected = zoo.forward(model, data, mode)
    assert len(zoo.gate(model)) == count
    assert_close(zoo.forward(model, data, mode), expected, 1e-4)


@pytest.mark.parametrize('name', TRAINED)
def test_training_step(name: str) -> None:
    """Losses are finite and every kind of gate moves."""
    cfg = zoo.reduced(ZOO[name][0])
    model, data = zoo.build(cfg), zoo.batch(cfg)
    zoo.gate(model)
    model.train()
    gates = {n: p for n, p in model.named_parameters() if '.gml.' in n or '.gate_' in n}
    before = {n: p.detach().clone() for n, p in gates.items() if '.gml.' in n}
    losses = {n: loss for n, loss in model(**data, mode='loss').items() if 'loss' in n}
    total = sum(sum(loss) if isinstance(loss, (list, tuple)) else loss for loss in losses.values())
    assert total.isfinite()
    optimizer = torch.optim.AdamW(gates.values(), lr=1e-3, weight_decay=0)
    total.backward()
    optimizer.step()
    moved = {n for n, p in before.items() if not torch.equal(p, gates[n])}
    assert len(moved) > len(before) / 2, sorted(set(before) - moved)


@pytest.mark.parametrize('name', UNGATED)
def test_the_gate_that_gates_nothing(name: str) -> None:
    config, _, mode = ZOO[name]
    cfg = zoo.reduced(config)
    model, data = zoo.build(cfg), zoo.batch(cfg)
    expected, losses = zoo.forward(model, data, mode), zoo.forward(model, data, 'loss')
    zoo.swap_attention(model, dict(type='MultiScaleDeformableAttention', path='**'))
    assert_close(zoo.forward(model, data, mode), expected, 1e-5)
    assert_close(zoo.forward(model, data, 'loss'), losses, 1e-5)
