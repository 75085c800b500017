"""Deformable attention in a graph, as gathered rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.exported import exports
from torch import Tensor, nn

from mmgate.deploy.graph import capture, write_onnx
from mmgate.deploy.network import Network
from mmgate.deploy.runtime import Exported
from mmgate.gates import PLuGMultiScaleDeformableAttention


class Levels(Network):
    """Gated attention over two levels of an image, whose sizes mmdet would read."""

    inputs = ('images',)
    outputs = ('tokens',)

    def __init__(self, num_points: int | list[int]) -> None:
        super().__init__(nn.Identity())
        self.attention = PLuGMultiScaleDeformableAttention(16, 2, num_levels=2, num_points=num_points, init='paper')
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
@pytest.mark.parametrize('num_points', [[3, 6], pytest.param(4, marks=pytest.mark.slow)], ids=str)
def test_sampling_computes_what_pytorch_does(num_points: int | list[int], tmp_path: Path) -> None:
    pytest.importorskip('onnxruntime', reason='needs the extra "deploy"')
    net, path = Levels(num_points).eval(), tmp_path / 'sampled.onnx'
    program, taken = capture(net, (torch.randn(2, 16, 16, 24),), 1)
    write_onnx(program, net, path, dict(taken, least=1))
    run = Exported(path)
    for shape in ((2, 16, 16, 24), (1, 16, 36, 8), (3, 16, 4, 4)):
        images = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(run(images)[0], net(images)[0], rtol=1e-4, atol=1e-5)
    nodes = pytest.importorskip('onnx').load(path).graph.node
    assert 'GridSample' not in {node.op_type for node in nodes}
