"""Hosts of projects that are cloned and not installed, by classes of our own that are called as theirs are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.backbones import trained
from helpers.projects import SHAPES, STARTS, Attention, MSDeformAttn, deformable_inputs
from torch import Tensor, nn

from mmgate import adapts, swap_attention
from mmgate.hosts.table import _ADAPTERS, adapter_for, gates_for, host_names
from mmgate.layers import PLuGMultiScaleDeformableAttention
from mmgate.layers.base.gate import Gate, Sizes
from mmgate.layers.base.gated import GatedModule

DEFORMABLE = ('MultiScaleDeformableAttention', 'PLuGMultiScaleDeformableAttention')


@pytest.fixture(autouse=True)
def _cloned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the classes where a clone has them."""
    monkeypatch.setattr(Attention, '__module__', 'projects.ViTDet.vitdet.vit')
    monkeypatch.setattr(MSDeformAttn, '__module__', 'maskdino.modeling.pixel_decoder.ops.modules.ms_deform_attn')


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
