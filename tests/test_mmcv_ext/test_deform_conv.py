"""Deformable convolution, with and without modulation, gives mmcv's values and gradients."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_same, values_and_gradients
from helpers.compiled_mmcv import by_both
from torch import Tensor

from mmgate.mmcv_ext import deform_conv as ours

# offsets' scale, kernel, stride, padding, dilation, groups, deformable groups
CASES = {
    'no offsets': (0.0, (3, 3), 1, 1, 1, 1, 1),
    'small': (1.5, (3, 3), 1, 1, 1, 1, 1),
    'outside': (30.0, (3, 3), 1, 1, 1, 1, 1),
    'strided and dilated': (1.5, (3, 3), 2, 2, 2, 1, 2),
    'groups and a flat kernel': (1.5, (1, 3), (2, 1), (0, 1), 1, 2, 4),
}


def drawn(name: str) -> tuple[list[Tensor], tuple[tuple[int, int], ...], tuple[int, int]]:
    """Return map, offset, mask, weight and bias; stride, padding and dilation; groups and deformable groups."""
    scale, kernel, *steps, groups, deform_groups = CASES[name]
    pairs = tuple((step, step) if isinstance(step, int) else step for step in steps)
    x = torch.randn(2, 8, 9, 11)
    weight = torch.randn(6, 8 // groups, *kernel)
    size = torch.nn.functional.conv2d(x, weight, None, *pairs, groups).shape[2:]
    points = deform_groups * kernel[0] * kernel[1]
    offset = torch.randn(2, 2 * points, *size) * scale
    return [x, offset, torch.rand(2, points, *size), weight, torch.randn(6)], pairs, (groups, deform_groups)


@pytest.mark.parametrize('name', CASES)
def test_with_modulation(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    convolve = pytest.importorskip('mmcv.ops').modulated_deform_conv2d
    inputs, steps, groups = drawn(name)

    def compute() -> dict[str, Tensor]:
        return values_and_gradients(lambda *given: convolve(*given, *steps, *groups), inputs, range(5))

    assert_same(*by_both(monkeypatch, 'modulated_deform_conv', compute), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('name', CASES)
def test_without(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    convolve = pytest.importorskip('mmcv.ops').deform_conv2d
    (x, offset, _, weight, _), steps, groups = drawn(name)

    def compute() -> dict[str, Tensor]:
        return values_and_gradients(lambda *given: convolve(*given, *steps, *groups), [x, offset, weight], range(3))

    assert_same(*by_both(monkeypatch, 'deform_conv', compute), rtol=1e-4, atol=1e-4)


def test_without_offsets_it_is_a_convolution_and_a_batch_may_be_empty() -> None:
    (x, offset, _, weight, bias), steps, _ = drawn('no offsets')
    expected = torch.nn.functional.conv2d(x, weight, bias, *steps)
    torch.testing.assert_close(ours.deform_conv(x, offset, None, weight, bias, *steps), expected, rtol=1e-4, atol=1e-5)
    assert ours.deform_conv(x[:0], offset[:0], None, weight, bias, *steps).shape == expected[:0].shape
