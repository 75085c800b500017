"""Our operators on a GPU, and torchvision's only where they run: the results are those of our operators on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.samplings import make
from torch import Tensor

from mmgate.mmcv_ext import boxes, extension, focal_loss, peer
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


OPERATORS = ('nms', 'nms with offset', 'soft_nms', 'roi_align', 'deform_conv', 'modulated', 'focal', 'deformable')
# narrower dtypes of those that take them
NARROW = [
    *((name, torch.float16) for name in ('nms', 'roi_align', 'focal')),
    ('roi_align', torch.bfloat16),
]


def computed(name: str, device: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return on the CPU what an operator gives on a device, with its gradients."""
    torch.manual_seed(0)
    corner = torch.rand(60, 2) * 16
    found = torch.cat([corner, corner + torch.rand(60, 2) * 8], 1)
    drawn = dict(x=(2, 4, 16, 24), grad=(60, 4, 7, 7), offset=(2, 18, 16, 24), weight=(4, 4, 3, 3), logits=(12, 4))
    x, grad, offset, weight, logits = (torch.randn(shape).to(device, dtype) for shape in drawn.values())
    # regions have the map's dtype, or that of parameters
    rois = torch.cat([torch.randint(2, (60, 1)), found], 1).to(device, torch.promote_types(dtype, torch.float32))
    scores = torch.rand(60) + torch.arange(60) * 1e-4  # devices order equal scores differently
    found, scores = found.to(device, dtype), scores.to(device)
    steps = ((1, 1), (1, 1), (1, 1))
    if name.startswith('nms'):
        results = [boxes.nms(found, scores, 0.3, int('offset' in name))]
    elif name == 'soft_nms':
        results = [*boxes.soft_nms(found, scores.to(dtype), 0.3, 0.5, 0.05, 2)]
    elif name == 'roi_align':
        options = (1.0, 0, True)
        results = [roi_align(x, rois, (7, 7), *options), roi_align_gradient(grad, rois, x.shape, *options)]
    elif name == 'focal':
        target, none = (torch.arange(12) % 4).to(device), torch.empty(0, device=device)
        results = [
            function(x, target, none, 2.0, 0.25)
            for function, x in (
                (focal_loss.sigmoid_focal_loss, logits),
                (focal_loss.sigmoid_focal_loss_gradient, logits),
                (focal_loss.softmax_focal_loss, logits.softmax(1)),
                (focal_loss.softmax_focal_loss_gradient, logits.softmax(1)),
            )
        ]
    elif name == 'deformable':
        given = make(device, dtype=dtype)[:5]
        output = extension.ms_deform_attn_forward(*given, 64)
        grads = [torch.empty_like(given[i]) for i in (0, 3, 4)]
        extension.ms_deform_attn_backward(*given, torch.ones_like(output), *grads, 64)
        results = [output, *grads]
    else:
        mask = x[:, :1].sigmoid().expand(-1, 9, -1, -1).contiguous() if name == 'modulated' else None
        of = (0, 1, 3) if mask is None else (0, 1, 2, 3)
        results = [
            deform_conv(x, offset, mask, weight, None, *steps),
            *gradients(x, (x, offset, mask, weight), *steps, of=of),
        ]
    return [result.cpu() for result in results]


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize('name, dtype', [*((name, torch.float64) for name in OPERATORS), *NARROW], ids=str)
def test_a_gpu_gives_the_same(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype) -> None:
    """By our operators, and by torchvision's where they run."""
    expected = computed(name, 'cpu', dtype)
    by_torchvision = computed(name, 'cuda', dtype)
    monkeypatch.setattr(peer, '_of_cuda', lambda: None)
    tolerance = 1e-8 if dtype is torch.float64 else 2e-2
    for results in (by_torchvision, computed(name, 'cuda', dtype)):
        for found, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
