"""What stands for operators that graphs do not have: equal to those, in PyTorch and in graphs of any size."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import TORCH
from mmcv.ops import batched_nms, roi_align
from mmseg.models.utils import Upsample
from torch import Tensor, nn

from mmgate.benchmarks.ops import deformable_inputs
from mmgate.deploy import nms as nms_module
from mmgate.deploy.nms import class_offsets, nms
from mmgate.deploy.roi_align import Align, pyramid_roi_align
from mmgate.deploy.sampling import gather
from mmgate.deploy.sizes import Sizes
from mmgate.deploy.tracing import adaptive_avg_pool2d, upsample, window_reverse
from mmgate.ops.ms_deform_attn import reference

exports = pytest.mark.skipif(TORCH < (2, 9), reason='whole models are exported by torch 2.9 or newer')


def boxes_and_scores(count: int = 60, classes: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    corner = torch.rand(2, count, 2) * 60
    boxes = torch.cat([corner, corner + 5 + torch.rand(2, count, 2) * 40], -1)
    scores = torch.rand(2, count)
    return boxes, torch.where(scores > 0.2, scores, -1.0), torch.randint(0, classes, (2, count))


def exported(function: Callable[..., Any], inputs: tuple[Tensor, ...], shapes: Any = None) -> Callable[..., Any]:
    """Return a function as a program of torch.export."""

    class Module(nn.Module):
        def forward(self, *inputs: Tensor) -> Any:
            return function(*inputs)

    with torch.no_grad():
        return torch.export.export(Module(), inputs, dynamic_shapes=shapes, strict=False).module()


@pytest.mark.parametrize('count', [10, 80], ids=['fewer than there are', 'more'])
@pytest.mark.parametrize('graph', [False, pytest.param(True, marks=exports)], ids=['eager', 'graph'])
def test_nms_is_mmcvs(count: int, graph: bool) -> None:
    boxes, scores, labels = boxes_and_scores()

    def run(boxes: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        return nms(boxes, scores, 0.5, count)

    apart = class_offsets(boxes, labels)
    index, best = (exported(run, (apart, scores)) if graph else run)(apart, scores)
    for image in range(2):
        there = (scores[image] > 0).nonzero().flatten()
        _, kept = batched_nms(boxes[image, there], scores[image, there], labels[image, there], dict(iou_threshold=0.5))
        expected = there[kept][:count]
        found = index[image][best[image] > 0]
        assert found.tolist() == expected.tolist()
        assert torch.equal(best[image][best[image] > 0], scores[image, expected])
        assert best.shape == (2, count) and (best[image][len(found) :] == -1).all()


def test_what_nms_keeps_is_what_it_lists() -> None:
    boxes, scores, _ = boxes_and_scores()
    index, best = nms(boxes, scores, 0.5, 60)
    kept = nms_module.keep(boxes, scores, 0.5)
    assert [k.nonzero().flatten().tolist() for k in kept] == [
        sorted(i[b > 0].tolist()) for i, b in zip(index, best, strict=True)
    ]


@pytest.mark.parametrize('sampling_ratio', [0, 2])
@pytest.mark.parametrize('aligned', [True, False], ids=['aligned', 'as of old'])
@pytest.mark.parametrize('graph', [False, pytest.param(True, marks=exports)], ids=['eager', 'graph'])
def test_roi_align_is_mmcvs(sampling_ratio: int, aligned: bool, graph: bool) -> None:
    maps = [torch.randn(2, 5, 24 // s, 32 // s) for s in (1, 2)]
    scales = (0.25, 0.125)
    corner = torch.rand(40, 2) * 110 - 10  # some reach beyond the map
    rois = torch.cat([torch.randint(0, 2, (40, 1)), corner, corner + torch.rand(40, 2) * 70], 1)
    rois[0, 1:] = 0  # an empty place
    levels = torch.randint(0, 2, (40,))
    options = Align(7, 5, sampling_ratio, aligned)

    def run(*inputs: Tensor) -> Tensor:
        return pyramid_roi_align(inputs[:2], inputs[2], inputs[3], scales, options)

    inputs = (*maps, rois, levels)
    output = (exported(run, inputs) if graph else run)(*inputs)
    for level in range(2):
        here = levels == level
        expected = roi_align(maps[level], rois[here], (7, 5), scales[level], sampling_ratio, 'avg', aligned)
        torch.testing.assert_close(output[here], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('size', [1, 3, 6, (2, None), 40], ids=str)
def test_pooling_is_torchs(size: Any) -> None:
    x = torch.randn(2, 3, 17, 32, dtype=torch.float64)
    torch.testing.assert_close(adaptive_avg_pool2d(x, size), F.adaptive_avg_pool2d(x, size))


def test_gathering_is_the_reference() -> None:
    inputs = deformable_inputs([(7, 9), (4, 5), (1, 1)], batch=2)
    inputs = [x.double() if x.is_floating_point() else x for x in inputs]
    torch.testing.assert_close(gather(*inputs), reference.sample(*inputs))


def test_sizes_are_numbers_to_hosts_and_tensors_to_operators() -> None:
    rows = [Sizes(torch.zeros(1, 8, 3 + i, 4).shape)[2:].to('cpu') for i in range(2)]
    sizes = torch.cat(rows).view(-1, 2)
    expected = torch.tensor([[3, 4], [4, 4]])
    assert [height * width for height, width in sizes] == [12, 16] and sizes[1][0] == 4 and len(sizes) == 2
    assert torch.equal(sizes.prod(1), expected.prod(1)) and torch.equal(sizes[:, 0], expected[:, 0])
    assert torch.equal(torch.ones(2, 2) / sizes, 1 / expected) and tuple(sizes.shape) == (2, 2)


@pytest.mark.parametrize('host', ['mmdet', 'mmseg'])
@pytest.mark.parametrize('graph', [False, pytest.param(True, marks=exports)], ids=['eager', 'graph of any batch'])
def test_windows_are_the_hosts(host: str, graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    swin = importlib.import_module(f'{host}.models.backbones.swin')
    attention = swin.ShiftWindowMSA(8, 2, window_size=3, shift_size=1)
    x = torch.randn(2, 6 * 9, 8)
    expected = attention(x, (6, 9))

    def run(x: Tensor) -> Tensor:
        return attention(x, (6, 9))

    monkeypatch.setattr(swin.ShiftWindowMSA, 'window_reverse', window_reverse)
    found = exported(run, (x,), (({0: torch.export.Dim('batch')},),)) if graph else run
    torch.testing.assert_close(found(x), expected)
    if graph:
        torch.testing.assert_close(found(torch.cat([x, x])), torch.cat([expected, expected]))


@pytest.mark.parametrize('factor', [2, 1.5])
def test_upsampling_is_mmsegs(factor: Any) -> None:
    module = Upsample(scale_factor=factor, mode='bilinear', align_corners=False)
    x = torch.randn(1, 2, 6, 8)
    expected = F.interpolate(x, scale_factor=factor, mode='bilinear', recompute_scale_factor=True)
    torch.testing.assert_close(upsample(Upsample.forward)(module, x), expected)
