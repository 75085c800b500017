"""The focal losses are their formulas; mmcv compiles them for GPUs alone, so mmdet's in Python is the other side."""

from __future__ import annotations

import pytest
import torch
from conftest import values_and_gradients
from torch import Tensor

from mmgate.mmcv_ext import extension
from mmgate.mmcv_ext import focal_loss as ours

NONE = torch.empty(0)


def drawn(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return logits, some of them far from 0, and targets with background (4) among them."""
    logits = torch.randn(12, 4, dtype=dtype)
    logits[0] = 40
    logits[1] = -40
    return logits, torch.randint(5, (12,))


@pytest.mark.parametrize('gamma, alpha', [(2.0, 0.25), (0.0, 0.5), (1.5, 0.75)])
def test_the_sigmoid_loss_is_mmdets(monkeypatch: pytest.MonkeyPatch, gamma: float, alpha: float) -> None:
    """Values and gradients through mmcv's function, which mmdet takes on GPUs, and mmdet's own for CPUs."""
    wrapper = pytest.importorskip('mmcv.ops.focal_loss')
    losses = pytest.importorskip('mmdet.models.losses.focal_loss')
    monkeypatch.setattr(wrapper, 'ext_module', extension)
    logits, target = drawn()
    one_hot = torch.nn.functional.one_hot(target, 5)[:, :4].double()
    found, expected = (
        values_and_gradients(loss, [logits], [0])
        for loss in (
            lambda x: wrapper.sigmoid_focal_loss(x, target, gamma, alpha, None, 'sum'),
            lambda x: losses.py_sigmoid_focal_loss(x, one_hot, gamma=gamma, alpha=alpha, reduction='sum'),
        )
    )
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize('weighted', [False, True])
def test_the_softmax_loss_is_its_formula(monkeypatch: pytest.MonkeyPatch, weighted: bool) -> None:
    wrapper = pytest.importorskip('mmcv.ops.focal_loss')
    monkeypatch.setattr(wrapper, 'ext_module', extension)
    logits = torch.randn(12, 4, dtype=torch.float64)
    target = torch.randint(4, (12,))
    weight = torch.rand(4, dtype=torch.float64) if weighted else None

    def formula(x: Tensor) -> Tensor:
        log_p = x.log_softmax(1).gather(1, target[:, None])[:, 0]
        return (-0.25 * (1 - log_p.exp()) ** 2 * log_p * (1 if weight is None else weight[target])).sum()

    found = values_and_gradients(
        lambda x: wrapper.softmax_focal_loss(x, target, 2.0, 0.25, weight, 'sum'), [logits], [0]
    )
    for name, value in values_and_gradients(formula, [logits], [0]).items():
        torch.testing.assert_close(found[name], value)


def test_rows_are_weighed_by_their_target_and_ignored_where_it_is_negative() -> None:
    logits, target = drawn()
    weight = torch.rand(4, dtype=torch.float64)
    factor = torch.cat([weight, torch.ones(1)])[target][:, None]
    for function in (ours.sigmoid_focal_loss, ours.sigmoid_focal_loss_gradient):
        plain = function(logits, target, NONE, 2.0, 0.25)
        torch.testing.assert_close(function(logits, target, weight, 2.0, 0.25), plain * factor)
    ignored = torch.full((12,), -1)
    for function in (ours.softmax_focal_loss, ours.softmax_focal_loss_gradient):
        assert not function(logits.softmax(1), ignored, NONE, 2.0, 0.25).any()
