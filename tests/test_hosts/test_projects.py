"""Hosts of projects that are cloned and not installed, by classes of our own that are called as theirs are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from mmcv.ops import MultiScaleDeformableAttention
from test_adapters import trained
from torch import Tensor, nn

from mmgate import adapts, swap_attention
from mmgate.hosts.table import _ADAPTERS, adapter_for, gates_for, host_names
from mmgate.layers import PLuGMultiScaleDeformableAttention
from mmgate.layers.base.gate import Gate, Sizes
from mmgate.layers.base.gated import GatedModule

SHAPES, STARTS = torch.tensor([[4, 6], [2, 3]]), torch.tensor([0, 24])
DEFORMABLE = ('MultiScaleDeformableAttention', 'PLuGMultiScaleDeformableAttention')


class Attention(nn.Module):
    """As mmdet's projects/ViTDet has it: a map with a table of distances a side."""

    def __init__(self, dim: int, num_heads: int, use_rel_pos: bool, input_size: tuple[int, int]) -> None:
        super().__init__()
        self.num_heads, self.scale, self.use_rel_pos = num_heads, (dim // num_heads) ** -0.5, use_rel_pos
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        if use_rel_pos:
            self.rel_pos_h, self.rel_pos_w = (
                nn.Parameter(torch.randn(2 * size - 1, dim // num_heads)) for size in input_size
            )

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        q, k, v = self.qkv(x).view(batch, height * width, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        logits = self.scale * q @ k.mT
        if self.use_rel_pos:
            for i in range(height * width):
                for j in range(height * width):
                    down, right = i // width - j // width, i % width - j % width
                    entry = self.rel_pos_h[down + height - 1] + self.rel_pos_w[right + width - 1]
                    logits[:, :, i, j] += q[:, :, i] @ entry
        out = logits.softmax(-1) @ v
        return self.proj(out.transpose(1, 2).reshape(batch, height, width, channels))


class MSDeformAttn(MultiScaleDeformableAttention):
    """As Deformable DETR, Mask DINO and ViT-Adapter have it: mmcv's by other arguments, and no identity."""

    def __init__(self, d_model: int, n_levels: int, n_heads: int, n_points: int, ratio: float = 1.0) -> None:
        sizes = (d_model, n_heads, n_levels, n_points)
        super().__init__(*sizes, dropout=0.0, batch_first=True, value_proj_ratio=ratio)
        self.d_model, self.n_levels, self.n_heads, self.n_points = d_model, n_levels, n_heads, n_points

    def forward(
        self,
        query: Tensor,
        reference_points: Tensor,
        input_flatten: Tensor,
        input_spatial_shapes: Tensor,
        input_level_start_index: Tensor,
        input_padding_mask: Tensor | None = None,
    ) -> Tensor:
        levels = dict(spatial_shapes=input_spatial_shapes, level_start_index=input_level_start_index)
        given = dict(value=input_flatten, key_padding_mask=input_padding_mask, reference_points=reference_points)
        return super().forward(query, identity=torch.zeros_like(query), **given, **levels)


class DecoderLayer(nn.Module):
    """As in Mask DINO: torch's self-attention, and a deformable cross-attention whose arguments have no names."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(32, 4)
        self.cross_attn = MSDeformAttn(32, 2, 4, 3)

    def forward(self, target: Tensor, points: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        target = target + self.self_attn(target, target, target)[0]
        crossed = self.cross_attn(target.transpose(0, 1), points, memory.transpose(0, 1), SHAPES, STARTS, mask)
        return target + crossed.transpose(0, 1)


@pytest.fixture(autouse=True)
def _cloned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the classes where a clone has them."""
    monkeypatch.setattr(Attention, '__module__', 'projects.ViTDet.vitdet.vit')
    monkeypatch.setattr(MSDeformAttn, '__module__', 'maskdino.modeling.pixel_decoder.ops.modules.ms_deform_attn')


def deformable_inputs(columns: int = 4) -> list[Tensor]:
    mask = torch.arange(30)[None] >= torch.tensor([[30], [25]])
    return [torch.randn(2, 5, 32), torch.rand(2, 5, 2, columns), torch.randn(2, 30, 32), SHAPES, STARTS, mask]


@pytest.mark.parametrize('gate', DEFORMABLE)
@pytest.mark.parametrize('columns', [2, 4])
@pytest.mark.parametrize('ratio', [1.0, 0.5])
def test_the_call_of_the_original_deformable_attention(ratio: float, columns: int, gate: str) -> None:
    model = trained(nn.ModuleDict(dict(attn=MSDeformAttn(32, 2, 4, 3, ratio))))
    gated = copy.deepcopy(model)
    swap_attention(gated, dict(type=gate, path='attn'))
    gated = copy.deepcopy(gated)  # its class goes with it
    inputs = deformable_inputs(columns)
    expected = model['attn'](*inputs)
    torch.testing.assert_close(gated['attn'](*inputs), expected, rtol=1e-5, atol=1e-5)
    named = dict(input_spatial_shapes=SHAPES, input_level_start_index=STARTS, input_padding_mask=inputs[-1])
    torch.testing.assert_close(gated['attn'](*inputs[:3], **named), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(gated['attn'](*inputs[:-1]), expected)


@pytest.mark.parametrize('width', [60, 88, 44])
def test_the_width_of_values_is_kept(width: int) -> None:
    """60 of 88 channels are a ratio whose product is a little below 60."""
    host = MSDeformAttn(88, 2, 4, 3, (width + 0.5) / 88)
    model: Any = nn.ModuleDict(dict(attn=host))
    swap_attention(model, dict(type=DEFORMABLE[0], path='attn'))
    assert model['attn'].value_proj.out_features == width


class CalledOtherwise(MSDeformAttn):
    __module__, __qualname__ = 'their.ms_deform_attn', 'MSDeformAttn'

    def forward(self, x: Tensor, points: Tensor) -> Tensor:  # type: ignore[override]
        return x


class WithAnOption(MSDeformAttn):
    __module__, __qualname__ = 'their.ms_deform_attn', 'MSDeformAttn'

    def __init__(self, d_model: int, n_levels: int, n_heads: int, n_points: int, sharp: bool = False) -> None:
        super().__init__(d_model, n_levels, n_heads, n_points)


@pytest.mark.parametrize(
    'kind, differs', [(CalledOtherwise, 'is called with x, points'), (WithAnOption, 'takes sharp')]
)
def test_another_class_of_the_name_is_refused(kind: type, differs: str) -> None:
    with pytest.raises(ValueError, match=f'their.ms_deform_attn.MSDeformAttn {differs} and may compute'):
        swap_attention(nn.ModuleDict(dict(attn=kind(32, 2, 4, 3))), dict(type=DEFORMABLE[0], path='attn'))


def test_a_name_stands_for_whole_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Attention(32, 4, False, (4, 6))
    assert [gate.__name__ for gate in gates_for(host) if gate.__module__.endswith('plug_dense')]
    monkeypatch.setattr(Attention, '__module__', 'myvitdet.vit')
    assert not gates_for(host)


def test_a_host_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair of one's own, of a gate that fits nothing else, too."""
    monkeypatch.setattr('mmgate.hosts.table._ADAPTERS', dict(_ADAPTERS))

    class Strange(Gate):
        pass

    class Pooling(nn.AdaptiveAvgPool1d):
        __module__, __qualname__ = 'theirs.layers', 'Pooling'

    @adapts(Strange, 'layers.Pooling')
    class GatedPooling(GatedModule):
        @classmethod
        def sizes(cls, host: Any) -> Sizes:
            return Sizes(8, 2)

    assert host_names(Strange) == ['layers.Pooling']
    assert adapter_for(Strange, Pooling(1)) == (GatedPooling, '')
    assert adapter_for(Strange, nn.AdaptiveAvgPool1d(1)) is None
    with pytest.raises(
        ValueError, match='other is a torch.*Linear, which Strange does not replace. It replaces\n  layers.Pooling'
    ):
        swap_attention(nn.ModuleDict(dict(other=nn.Linear(2, 2))), dict(type=Strange, path='other'))
    model: Any = nn.ModuleDict(dict(pool=Pooling(1)))
    swap_attention(model, dict(type=Strange, path='pool'))
    assert isinstance(model['pool'], GatedPooling) and isinstance(model['pool'], Pooling)


@pytest.mark.parametrize('name', ['Attention', 'vit.', '.vit.Attention', ''])
def test_a_name_needs_its_module(name: str) -> None:
    with pytest.raises(TypeError, match='is no dotted name of a host class'):
        adapts(PLuGMultiScaleDeformableAttention, name)
