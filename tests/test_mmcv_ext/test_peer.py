"""torchvision's operators: only where they run, and then with our results."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmgate.mmcv_ext import peer
from mmgate.mmcv_ext.boxes import nms
from mmgate.mmcv_ext.deform_conv import deform_conv, gradients
from mmgate.mmcv_ext.roi_align import roi_align, roi_align_gradient

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    peer._of_cuda.cache_clear()
    yield
    peer._of_cuda.cache_clear()


def fails(*args: Any) -> None:
    raise NotImplementedError("Could not run 'torchvision::nms' with arguments from the 'CUDA' backend.")


@pytest.mark.parametrize('ops', [None, SimpleNamespace(nms=fails)], ids=['not there', 'for another torch'])
def test_a_torchvision_that_does_not_run_is_left_alone(monkeypatch: pytest.MonkeyPatch, ops: Any) -> None:
    monkeypatch.setitem(sys.modules, 'torchvision.ops', ops)
    assert peer.torchvision_ops(torch.empty(1)) is None
    assert peer.torchvision_ops(SimpleNamespace(is_cuda=True)) is None  # type: ignore[arg-type]


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize('name', ['nms', 'nms with offset', 'roi_align', 'deform_conv', 'modulated'])
def test_it_gives_our_results(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if peer.torchvision_ops(torch.empty(1, device='cuda')) is None:
        pytest.skip('needs a torchvision that runs on the GPU')
    x = torch.randn(2, 4, 16, 24, device='cuda', dtype=torch.float64)
    corner = torch.rand(60, 2, device='cuda') * 16
    boxes = torch.cat([corner, corner + torch.rand(60, 2, device='cuda') * 8], 1)
    scores = torch.rand(60, device='cuda')
    rois = torch.cat([torch.randint(2, (60, 1), device='cuda'), boxes], 1).double()
    grad = torch.randn(60, 4, 7, 7, device='cuda', dtype=torch.float64)
    offset = torch.randn(2, 18, 16, 24, device='cuda', dtype=torch.float64)
    mask = torch.rand(2, 9, 16, 24, device='cuda', dtype=torch.float64) if name == 'modulated' else None
    weight = torch.randn(4, 4, 3, 3, device='cuda', dtype=torch.float64)
    steps = ((1, 1), (1, 1), (1, 1))

    def compute() -> list[torch.Tensor]:
        if name.startswith('nms'):
            return [nms(boxes, scores, 0.3, int('offset' in name))]
        if name == 'roi_align':
            options = (1.0, 0, True)
            return [roi_align(x, rois, (7, 7), *options), roi_align_gradient(grad, rois, x.shape, *options)]
        of = (0, 1, 3) if mask is None else (0, 1, 2, 3)
        return [
            deform_conv(x, offset, mask, weight, None, *steps),
            *gradients(x, (x, offset, mask, weight), *steps, of=of),
        ]

    by_torchvision = compute()
    monkeypatch.setattr(peer, '_of_cuda', lambda: None)
    for found, expected in zip(by_torchvision, compute(), strict=True):
        torch.testing.assert_close(found, expected)
