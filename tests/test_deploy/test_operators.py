"""What stands for operators that graphs lack, and the ways to write sampling down: equal, in graphs of any size."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exported import exports
from mmcv.ops import batched_nms
from mmseg.models.utils import Upsample
from torch import Tensor, nn

from mmgate.deploy.boxes import Boxes, non_maximum_suppression
from mmgate.deploy.graph import capture, write_onnx
from mmgate.deploy.network import Network
from mmgate.deploy.operators import nms_keep, roi_align
from mmgate.deploy.runtime import Exported
from mmgate.deploy.tracing import adaptive_avg_pool2d, upsample, window_reverse
from mmgate.errors import ConfigError
from mmgate.layers import PLuGMultiScaleDeformableAttention


def boxes_and_scores(count: int = 60, classes: int = 3) -> Boxes:
    corner = torch.rand(2, count, 2) * 60
    boxes = torch.cat([corner, corner + 5 + torch.rand(2, count, 2) * 40], -1)
    scores = torch.rand(2, count)
    return Boxes(boxes, torch.where(scores > 0.2, scores, -1.0), torch.randint(0, classes, (2, count)))


@pytest.mark.parametrize('count', [10, 80], ids=['fewer than there are', 'more'])
@pytest.mark.parametrize('agnostic', [False, True], ids=['by class', 'of all classes'])
def test_the_best_boxes_are_mmcvs(count: int, agnostic: bool) -> None:
    found = boxes_and_scores()
    cfg = dict(type='nms', iou_threshold=0.5, class_agnostic=agnostic)
    chosen = non_maximum_suppression(found, cfg, count)
    for image in range(2):
        boxes, scores, labels = (part[image] for part in found)
        there = (scores > 0).nonzero().flatten()
        _, kept = batched_nms(boxes[there], scores[there], labels[there], dict(cfg), class_agnostic=agnostic)
        expected = there[kept][:count]
        number = len(expected)
        for part, whole in zip(chosen, (boxes, scores, labels), strict=True):
            assert torch.equal(part[image, :number], whole[expected])
        assert chosen.scores.shape == (2, count) and (chosen.scores[image, number:] == -1).all()
        assert (chosen.labels[image, number:] == -1).all() and not chosen.boxes[image, number:].any()


def test_another_suppression_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'nms=.*soft_nms.* cannot be exported: ONNX has .*--cfg-options'):
        non_maximum_suppression(boxes_and_scores(), dict(type='soft_nms', iou_threshold=0.5), 10)


class Operators(Network):
    """Both operators, of images whose number and size are open."""

    inputs = ('images', 'boxes', 'scores', 'rois')
    outputs = ('kept', 'old', 'aligned')

    def forward(self, images: Tensor, boxes: Tensor, scores: Tensor, rois: Tensor) -> tuple[Tensor, ...]:
        aligned = roi_align(images, rois, 7, 5, 0.25, 0, True)
        return nms_keep(boxes, scores, 0.5).long(), roi_align(images, rois, 7, 5, 0.5, 2, False), aligned


@exports
def test_files_hold_mmcvs_operators(tmp_path: Path) -> None:
    pytest.importorskip('onnxruntime', reason='needs the extra "deploy"')

    def inputs(images: int, rois: int) -> tuple[Tensor, ...]:
        corner = torch.rand(rois, 2) * 110 - 10  # some reach beyond the map
        number = torch.randint(0, images, (rois, 1))
        found = boxes_and_scores()
        regions = torch.cat([number, corner, corner + torch.rand(rois, 2) * 70], 1)
        regions[0, 1:] = 0  # an empty place
        return torch.randn(images, 3, 24, 32), found.boxes[:images], found.scores[:images], regions

    network, batch = Operators(nn.Identity()), torch.export.Dim('batch')
    shapes = ({0: batch}, {0: batch}, {0: batch}, {0: torch.export.Dim('rois')})
    program = torch.export.export(network, inputs(2, 40), dynamic_shapes=shapes, strict=False)
    notes = dict(takes='any', divisor=1, least=1)
    write_onnx(program, network, tmp_path / 'operators.onnx', notes)
    run = Exported(tmp_path / 'operators.onnx')
    for tensors in (inputs(2, 40), inputs(1, 3)):
        for found, expected in zip(run(*tensors), network(*tensors), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('size', [1, 3, 6, (2, None), 40], ids=str)
def test_pooling_is_torchs(size: Any) -> None:
    x = torch.randn(2, 3, 17, 32, dtype=torch.float64)
    torch.testing.assert_close(adaptive_avg_pool2d(x, size), F.adaptive_avg_pool2d(x, size))


@exports
@pytest.mark.parametrize('host', ['mmdet', 'mmseg'])
def test_windows_of_any_batch_are_the_hosts(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    swin = importlib.import_module(f'{host}.models.backbones.swin')
    attention = swin.ShiftWindowMSA(8, 2, window_size=3, shift_size=1)
    x = torch.randn(2, 6 * 9, 8)
    expected = attention(x, (6, 9))
    monkeypatch.setattr(swin.ShiftWindowMSA, 'window_reverse', window_reverse)
    torch.testing.assert_close(attention(x, (6, 9)), expected)

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return attention(x, (6, 9))

    with torch.no_grad():
        run = torch.export.export(Module(), (x,), dynamic_shapes=({0: torch.export.Dim('batch')},), strict=False)
    torch.testing.assert_close(run.module()(torch.cat([x, x])), torch.cat([expected, expected]))


@pytest.mark.parametrize('options', [dict(scale_factor=2), dict(scale_factor=1.5), dict(size=(5, 7))], ids=str)
def test_upsampling_is_mmsegs(options: dict[str, Any]) -> None:
    module = Upsample(mode='bilinear', align_corners=False, **options)
    x = torch.randn(1, 2, 6, 8)
    torch.testing.assert_close(upsample(module, x), module(x))


class Levels(Network):
    """Gated attention over two levels of an image, whose sizes mmdet would read."""

    inputs = ('images',)
    outputs = ('tokens',)

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.attention = PLuGMultiScaleDeformableAttention(16, 2, num_levels=2, init='paper')
        for parameter in self.attention.parameters():
            nn.init.normal_(parameter, std=0.5)

    def forward(self, images: Tensor) -> tuple[Tensor]:
        maps = [F.avg_pool2d(images, side) for side in (2, 4)]
        sizes = torch.cat([torch._shape_as_tensor(map_)[2:] for map_ in maps]).view(-1, 2)
        starts = torch.cat([sizes.new_zeros(1), sizes.prod(1).cumsum(0)[:-1]])
        points = torch.cat(
            [torch.stack([torch.linspace(0.0, 1.0, h * w), torch.linspace(1.0, 0.0, h * w)], -1) for h, w in sizes]
        )
        tokens = torch.cat([map_.flatten(2) for map_ in maps], 2).permute(2, 0, 1)  # (S, B, C)
        reference = points[None, :, None].expand(tokens.shape[1], -1, 2, -1)
        options = dict(reference_points=reference, spatial_shapes=sizes, level_start_index=starts)
        return (self.attention(tokens, value=tokens, **options),)


@exports
@pytest.mark.parametrize('name, grids', [('gather', 0), ('grid', 2)])  # a node a level
def test_sampling_computes_what_pytorch_does(name: str, grids: int, tmp_path: Path) -> None:
    pytest.importorskip('onnxruntime', reason='needs the extra "deploy"')
    net, path = Levels().eval(), tmp_path / 'sampled.onnx'
    program, taken = capture(net, (torch.randn(2, 16, 16, 24),), 1, name)
    write_onnx(program, net, path, dict(taken, least=1))
    run = Exported(path)
    for shape in ((2, 16, 16, 24), (1, 16, 36, 8), (3, 16, 4, 4)):
        images = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(run(images)[0], net(images)[0], rtol=1e-4, atol=1e-5)
    nodes = pytest.importorskip('onnx').load(path).graph.node
    assert [node.op_type for node in nodes].count('GridSample') == grids
