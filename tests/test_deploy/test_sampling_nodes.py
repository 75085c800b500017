"""The three ways to write deformable attention down, in a graph of any size, and the operators that each holds."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import exports
from torch import Tensor, nn
from torch.nn import functional as F

from mmgate.deploy.capture import capture
from mmgate.deploy.network import Network
from mmgate.deploy.sampling import PLUGIN, SAMPLERS
from mmgate.errors import ConfigError
from mmgate.layers import PLuGMultiScaleDeformableAttention

onnx = pytest.importorskip('onnx', reason='needs the extra "deploy"')
pytest.importorskip('onnxruntime', reason='needs the extra "deploy"')
pytestmark = exports
NOTES = dict(model='Levels', divisor=1, least=1, size=[16, 16], takes='images of any size')


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


@pytest.fixture(scope='module')
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Levels, dict[str, Path]]:
    from mmgate.deploy.onnx_file import write_onnx

    net, paths = Levels().eval(), {}
    for name in SAMPLERS:
        captured = capture(net, (torch.randn(2, 16, 16, 24),), format='onnx', msda=name)
        assert captured.divisor == 1
        paths[name] = tmp_path_factory.mktemp('sampled') / f'{name}.onnx'
        write_onnx(captured.program, net, paths[name], dict(NOTES, inputs=net.inputs, outputs=net.outputs))
    return net, paths


def operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


@pytest.mark.parametrize('name', ['gather', 'grid'])
def test_computes_what_pytorch_does(name: str, files: Any) -> None:
    from mmgate.deploy.runtime import Exported

    net, paths = files
    run = Exported(paths[name])
    for shape in ((2, 16, 16, 24), (1, 16, 36, 8), (3, 16, 4, 4)):
        images = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(run(images)[0], net(images)[0], rtol=1e-4, atol=1e-5)


def test_gathering_has_no_grid_sample(files: Any) -> None:
    found = {name: operators(path) for name, path in files[1].items()}
    assert found['grid']['GridSample'] == 2  # one a level
    assert not found['gather']['GridSample'] and not found['plugin']['GridSample']


def test_the_plugins_node_takes_what_tensorrt_wants(files: Any) -> None:
    model = onnx.load(files[1]['plugin'])
    (node,) = (node for node in model.graph.node if node.op_type == PLUGIN)
    assert len(node.input) == 5 and len(node.output) == 1 and not node.attribute
    kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.value_info}
    kinds |= {value.name: value.data_type for value in model.graph.initializer}
    wanted = [onnx.TensorProto.FLOAT, onnx.TensorProto.INT32, onnx.TensorProto.INT32] + [onnx.TensorProto.FLOAT] * 2
    assert [kinds[name] for name in node.input] == wanted


def test_onnxruntime_refuses_the_plugin_by_name(files: Any) -> None:
    from mmgate.deploy.runtime import Exported

    with pytest.raises(ConfigError, match=re.escape(f'has nodes {PLUGIN}, which TensorRT alone can run')):
        Exported(files[1]['plugin'])
