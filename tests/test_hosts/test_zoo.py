"""One config of every architecture in the zoos that a gate fits: built, gated, compared with itself."""

from __future__ import annotations

import logging

import pytest
import torch
from helpers import zoo
from helpers.zoo import ZOO

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, 'mmengine')


@pytest.mark.parametrize('name', ZOO)
def test_every_architecture_starts_as_the_vanilla_one(name: str) -> None:
    config, count, mode = ZOO[name]
    cfg = zoo.reduced(config)
    model, data = zoo.build(cfg), zoo.batch(cfg)
    expected = zoo.forward(model, data, mode)
    assert len(zoo.gate(model)) == count
    assert expected
    for actual, wanted in zip(zoo.forward(model, data, mode), expected, strict=True):
        assert wanted.isfinite().all()
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-4 * max(1.0, wanted.abs().max().item()))
