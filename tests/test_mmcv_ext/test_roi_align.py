"""RoIAlign gives mmcv's values and gradients for any region, in any number of groups."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_same, values_and_gradients
from helpers.compiled_mmcv import by_both
from torch import Tensor

from mmgate.mmcv_ext import roi_align as ours


def regions(kind: str) -> Tensor:
    """Return regions in two images of 128 by 192 pixels."""
    number = 0 if kind == 'none' else 24
    corner = torch.rand(number, 2) * torch.tensor([192.0, 128.0])
    size = torch.rand(number, 2) * torch.tensor([192.0, 128.0])
    if kind == 'zero size':
        size[::2] = 0
        size[1::4, 0] = 0
    elif kind == 'outside':
        corner = corner + torch.tensor([[-400.0, 0.0], [150.0, 0.0], [0.0, 300.0], [-50.0, -60.0]]).repeat(6, 1)
    elif kind == 'huge':
        corner, size = corner - 2000, size * 40
    elif kind == 'on pixels':
        corner, size = (corner / 8).round() * 8, (size / 8).round() * 8
    return torch.cat([torch.randint(2, (number, 1)).float(), corner, corner + size], 1)


@pytest.mark.parametrize('kind', ['random', 'none', 'zero size', 'outside', 'huge', 'on pixels'])
@pytest.mark.parametrize('sampling_ratio', [0, 2])
@pytest.mark.parametrize('aligned', [True, False], ids=['aligned', 'not aligned'])
@pytest.mark.parametrize('size', [(7, 7), (3, 1)], ids=str)
def test_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch, kind: str, sampling_ratio: int, aligned: bool, size: tuple[int, int]
) -> None:
    roi_align = pytest.importorskip('mmcv.ops').roi_align
    monkeypatch.setattr(ours, 'PIXELS', 3000)  # many groups
    x, rois = torch.randn(2, 3, 16, 24), regions(kind)

    def compute() -> dict[str, Tensor]:
        return values_and_gradients(
            lambda x, rois: roi_align(x, rois, size, 1 / 8, sampling_ratio, 'avg', aligned), [x, rois], [0]
        )

    found, expected = by_both(monkeypatch, 'roi_align', compute)
    assert_same(found, expected, rtol=1e-4, atol=2e-5)


def test_a_map_of_one_pixel_and_an_empty_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    roi_align = pytest.importorskip('mmcv.ops').roi_align
    x, rois = torch.randn(2, 3, 1, 1), regions('random')
    found, expected = by_both(monkeypatch, 'roi_align', lambda: roi_align(x, rois, 2, 1 / 128, 0))
    torch.testing.assert_close(found, expected)
    assert roi_align(torch.zeros(0, 3, 4, 4), torch.zeros(0, 5), 2, 1.0).shape == (0, 3, 2, 2)


def test_the_largest_of_samples_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    roi_align = pytest.importorskip('mmcv.ops').roi_align
    x, rois = torch.randn(2, 3, 8, 8), regions('random')
    with pytest.raises(NotImplementedError, match="roi_align with pool_mode='max'.*compiled operators"):
        by_both(monkeypatch, 'roi_align', lambda: roi_align(x, rois, 2, 1.0, 0, 'max'))


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_16_bits_are_summed_in_float32(dtype: torch.dtype) -> None:
    x, rois = torch.randn(2, 3, 16, 24).to(dtype), regions('random')
    found = ours.roi_align(x, rois, (7, 7), 1 / 8, 0, True)
    expected = ours.roi_align(x.float(), rois, (7, 7), 1 / 8, 0, True)
    assert found.dtype == dtype and torch.equal(found, expected.to(dtype))
    grad = ours.roi_align_gradient(found, rois, x.shape, 1 / 8, 0, True)
    assert torch.equal(grad, ours.roi_align_gradient(found.float(), rois, x.shape, 1 / 8, 0, True).to(dtype))


@pytest.mark.parametrize('bad', [float('nan'), float('inf')])
def test_a_box_that_is_no_number_is_said(bad: float) -> None:
    rois = torch.tensor([[0.0, 1, 1, 5, 5], [0.0, 1, bad, 5, 5]])
    with pytest.raises(ValueError, match='NaN or infinite, as of a training that has diverged'):
        ours.roi_align(torch.randn(1, 2, 8, 8), rois, (2, 2), 1.0, 0, True)
