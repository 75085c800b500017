"""Hosts of projects that are cloned and not installed, by classes of our own that are called as theirs are."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.repositories import PLACES, STARTS, Attention, Layer, deformable_inputs, in_clone
from torch import Tensor, nn

from mmgate import adapts, swap_attention
from mmgate.gates import PLuGMultiScaleDeformableAttention
from mmgate.hosts.table import gates_for

PLUG = 'PLuGMultiScaleDeformableAttention'


@pytest.mark.parametrize(
    'name, missing',
    [('grounding_dino', 'reference_points'), ('detrex', 'spatial_shapes'), ('detrex', 'level_start_index')],
)
def test_levels_have_to_be_given(name: str, missing: str) -> None:
    model = Layer(name)
    swap_attention(model, dict(type=PLUG, path='attn'))
    query, points, memory, shapes, *_ = deformable_inputs()
    levels = dict(reference_points=points, spatial_shapes=shapes, level_start_index=STARTS) | {missing: None}
    with pytest.raises(ValueError, match='reference_points, spatial_shapes and level_start_index are needed'):
        model.attn(query, value=memory, **levels)


# by repository, an option that computes something else and what the refusal says
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ('dino', dict(use_4D_normalizer=True), 'has use_4D_normalizer=True, which moves points by the size of a level'),
    ('rt_detr_v2', dict(method='discrete'), "has method='discrete', and the gates sample bilinearly"),
    ('d_fine', dict(method='discrete'), "has method='discrete', and the gates sample bilinearly"),
]


def test_the_width_of_values_is_kept() -> None:
    """60 of 88 channels are a ratio whose product is a little below 60."""
    model: Any = nn.ModuleDict(dict(attn=in_clone('dino')(88, ratio=60.5 / 88)))
    swap_attention(model, dict(type='MultiScaleDeformableAttention', path='attn'))
    assert model['attn'].value_proj.out_features == 60


@pytest.mark.parametrize('name, options, words', REFUSED, ids=str)
def test_an_option_that_computes_something_else_is_refused(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f'this {PLACES[name].module}.{PLACES[name].name} {words}'):
        swap_attention(Layer(name, **options), dict(type=PLUG, path='attn'))


def test_a_name_stands_for_whole_parts_of_a_module_and_a_class() -> None:
    host = Attention(32, 4, False, (4, 6))
    assert [gate.__name__ for gate in gates_for(host) if gate.__module__.endswith('plug')]
    host.__class__ = type('Attention', (Attention,), dict(__module__='myvitdet.vit'))
    assert not gates_for(host)
    for name in ('Attention', 'vit.', '.vit.Attention', ''):
        with pytest.raises(TypeError, match='is no dotted name of a host class'):
            adapts(PLuGMultiScaleDeformableAttention, name)


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
