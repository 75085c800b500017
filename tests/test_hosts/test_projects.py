"""Hosts of projects that are cloned and not installed, by classes of our own that are called as theirs are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import filled
from helpers.backbones import trained
from helpers.repositories import PLACES, SHAPES, STARTS, Attention, Layer, deformable_inputs, in_clone
from torch import Tensor, nn

from mmgate import adapts, gate_parameters, record, restore_attention, swap_attention
from mmgate.adapter import Adapter
from mmgate.gate import Gate, Sizes
from mmgate.gates import PLuGMultiScaleDeformableAttention
from mmgate.hosts.table import _ADAPTERS, adapter_for, gates_for, host_names

DEFORMABLE = ('MultiScaleDeformableAttention', 'PLuGMultiScaleDeformableAttention')
PLUG = DEFORMABLE[1]


@pytest.mark.parametrize('ratio, columns, gate', [(1.0, 2, PLUG), (0.5, 4, PLUG), (0.5, 2, DEFORMABLE[0])])
def test_the_call_of_the_original_deformable_attention(ratio: float, columns: int, gate: str) -> None:
    model = trained(nn.ModuleDict(dict(attn=in_clone('dino')(ratio=ratio))))
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
    model: Any = nn.ModuleDict(dict(attn=in_clone('dino')(88, ratio=(width + 0.5) / 88)))
    swap_attention(model, dict(type=DEFORMABLE[0], path='attn'))
    assert model['attn'].value_proj.out_features == width


def test_a_name_stands_for_whole_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Attention(32, 4, False, (4, 6))
    assert [gate.__name__ for gate in gates_for(host) if gate.__module__.endswith('plug')]
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
    class GatedPooling(Adapter):
        @classmethod
        def sizes(cls, host: Any) -> Sizes:
            return Sizes(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

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


def inputs(columns: int = 4, levels: int = 2) -> list[Tensor]:
    query, points, memory, shapes, _, mask = deformable_inputs(columns)
    return [query, points[:, :, :levels], memory, shapes, mask]


def gradients(model: nn.Module, given: list[Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    query = given[0].clone().requires_grad_()
    model(query, *given[1:]).square().sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert query.grad is not None
    return {**found, 'query': query.grad}


CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in PLACES),
    *((name, dict(num_points=[3, 6])) for name in ('rt_detr_v2', 'd_fine')),
    ('d_fine', dict(num_points=[4, 1], offset_scale=0.25)),
    ('d_fine', dict(num_points=[3, 3])),
    ('rt_detr_v2', dict(offset_scale=1.0)),
]


@pytest.mark.parametrize('columns, levels, gate', [(2, 2, PLUG), (4, 2, DEFORMABLE[0]), (4, 1, PLUG)])
@pytest.mark.parametrize('name, options', CASES, ids=str)
def test_a_gated_class_computes_what_its_host_does(
    name: str, options: dict[str, Any], columns: int, levels: int, gate: str
) -> None:
    """Its gradients are the host's as well; a box of all levels is one for each."""
    model = filled(Layer(name, **options), 0.2)
    gated, given = copy.deepcopy(model), inputs(columns, levels)
    swap_attention(gated, dict(type=gate, path='attn'))
    gated = copy.deepcopy(gated)  # its class goes with it
    expected = model(*given)
    torch.testing.assert_close(gated(*given), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(gated(*given[:-1], torch.zeros_like(given[-1])), expected, atol=1e-3)
    ours, theirs = gradients(gated, given), gradients(model, given)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-3, atol=1e-4, msg=lambda m, k=key: f'{k}: {m}')
    for parameter in gate_parameters(gated).values():
        nn.init.normal_(parameter)
    assert gate == DEFORMABLE[0] or not torch.allclose(gated(*given), expected, atol=1e-3)
    restore_attention(gated)
    assert torch.equal(gated(*given), expected)


@pytest.mark.parametrize(
    'name, missing',
    [('grounding_dino', 'reference_points'), ('detrex', 'spatial_shapes'), ('detrex', 'level_start_index')],
)
def test_levels_have_to_be_given(name: str, missing: str) -> None:
    model = Layer(name)
    swap_attention(model, dict(type=PLUG, path='attn'))
    query, points, memory, shapes, _ = inputs()
    levels = dict(reference_points=points, spatial_shapes=shapes, level_start_index=STARTS) | {missing: None}
    with pytest.raises(ValueError, match='reference_points, spatial_shapes and level_start_index are needed'):
        model.attn(query, value=memory, **levels)


# by repository, an option that computes something else and what the refusal says
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ('dino', dict(use_4D_normalizer=True), 'has use_4D_normalizer=True, which moves points by the size of a level'),
    ('rt_detr_v2', dict(method='discrete'), "has method='discrete', and the gates sample bilinearly"),
    ('d_fine', dict(method='discrete'), "has method='discrete', and the gates sample bilinearly"),
]


@pytest.mark.parametrize('name, options, words', REFUSED, ids=str)
def test_an_option_that_computes_something_else_is_refused(name: str, options: dict[str, Any], words: str) -> None:
    module, called, _ = PLACES[name]
    with pytest.raises(ValueError, match=f'this {module}.{called} {words}'):
        swap_attention(Layer(name, **options), dict(type=PLUG, path='attn'))


@pytest.mark.parametrize('name', PLACES)
def test_a_class_with_more_options_is_refused(name: str) -> None:
    model: Any = Layer(name)
    host = type(model.attn)

    def init(self: Any, *args: Any, sharp: bool = False, **kwargs: Any) -> None:
        host.__init__(self, *args, **kwargs)

    def forward(self: Any, x: Tensor) -> Tensor:
        return x

    place = dict(__module__=host.__module__, __qualname__=host.__qualname__)
    for changed, words in ((dict(__init__=init), 'takes .*sharp'), (dict(forward=forward), 'is called with x')):
        model.attn.__class__ = type(host.__name__, (host,), {**place, **changed})
        with pytest.raises(ValueError, match=f'{words}.* may compute something else'):
            swap_attention(model, dict(type=PLUG, path='attn'))


def test_sampling_points_are_read() -> None:
    """Of the gated module, and of ultralytics' before, which is called by other names."""
    vanilla, given = filled(Layer('ultralytics'), 0.2), inputs()
    gated = copy.deepcopy(vanilla)
    swap_attention(gated, dict(type=PLUG, path='attn'))
    found = []
    for model in (vanilla, gated):
        with record(model, ('locations', 'weights')) as recording, torch.no_grad():
            model(*given)
        found.append({name: reading.last for name, reading in recording['attn'].items()})
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    assert found[0]['locations'].shape == (2, 5, 4, 2, 3, 2)
