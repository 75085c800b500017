"""Whole backbones in one graph of torch.compile, and a model as a package of AOTInductor that needs no mmgate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import one_graph
from exported import batches, build, exports
from mmengine.registry import MODELS
from torch import Tensor

import mmgate  # noqa: F401
from mmgate.deploy.export import export
from mmgate.deploy.networks import network
from mmgate.deploy.runtime import Exported
from mmgate.errors import ConfigError

SMALL = dict(
    AgentPVT=dict(num_layers=(1, 1, 1, 1)),
    AgentSwin=dict(depths=(1, 2, 1, 1), blocks=(1, 1, 0, 0)),
    AgentCSwin=dict(),
    SAGAPVT=dict(num_layers=(1, 1, 1, 1)),
    SAGAPVTv2=dict(),
    SAGASwin=dict(depths=(1, 2, 1, 1), blocks=(1, 1, 0, 0)),
    LinearPVT=dict(attention=dict(type='FocusedLinearAttention'), num_layers=(1, 1, 1, 1)),
    LinearSwin=dict(attention=dict(type='FocusedLinearAttention'), depths=(1, 2, 1, 1), blocks=(1, 1, 0, 0)),
)


@one_graph
@pytest.mark.slow
@pytest.mark.parametrize('kind', SMALL)
def test_a_backbone_is_one_graph(kind: str) -> None:
    backbone = MODELS.build(dict(type=f'mmgate.{kind}', **SMALL[kind])).eval()
    images = torch.randn(1, 3, 64, 96)
    torch._dynamo.reset()
    compiled = torch.compile(backbone, backend='eager', fullgraph=True)
    with torch.no_grad():
        for found, expected in zip(compiled(images), backbone(images), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


ALONE = """
import sys
for name in ('mmgate', 'mmengine', 'mmcv', 'mmdet', 'mmseg'):
    sys.modules[name] = None  # whoever imports it fails
import torch
package = torch._inductor.aoti_load_package(sys.argv[1])
torch.save([output.clone() for output in package(*torch.load(sys.argv[2]))], sys.argv[3])
"""


@exports
@pytest.mark.slow
def test_a_package_runs_without_mmgate(tmp_path: Path) -> None:
    name = 'plug-mask2former'
    model, images = build(name), batches(name, tmp_path)
    found = export(model, images, tmp_path / 'model.pt2', format='aot-inductor', fixed_size=True)
    assert found.images == 4
    with pytest.raises(ConfigError, match='may hold code, which opening it would run.*--trust-checkpoint'):
        Exported(tmp_path / 'model.pt2')
    assert Exported(tmp_path / 'model.pt2', trusted=True).notes['divisor'] == 0
    inputs: tuple[Tensor, ...] = (torch.randn(3, 3, 128, 128),)
    torch.save(inputs, tmp_path / 'inputs.pt')
    files = [str(tmp_path / file) for file in ('model.pt2', 'inputs.pt', 'outputs.pt')]
    subprocess.run([sys.executable, '-W', 'ignore', '-c', ALONE, *files], check=True, cwd=tmp_path, timeout=300)
    with torch.no_grad():
        expected = network(model)(*inputs)
    for one, other in zip(torch.load(tmp_path / 'outputs.pt'), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
