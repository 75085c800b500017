"""Deformable attentions of repositories, known by name, by classes of ours that are called as theirs are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import filled
from repositories import PLACES, Layer
from test_project_hosts import DEFORMABLE, deformable_inputs
from torch import Tensor, nn

from mmgate import gate_parameters, restore_attention, swap_attention
from mmgate.analysis.probes.recording import record

PLUG = DEFORMABLE[1]


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


@pytest.mark.parametrize('gate', DEFORMABLE)
@pytest.mark.parametrize('columns, levels', [(2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize('name', PLACES)
def test_a_gated_class_computes_what_its_host_does(name: str, columns: int, levels: int, gate: str) -> None:
    """Its gradients are the host's as well; a box of all levels is one for each."""
    model = filled(Layer(name), 0.2)
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


@pytest.mark.parametrize('scale', [0.25, 1.0])
@pytest.mark.parametrize('name', ['rt_detr_v2', 'd_fine'])
def test_the_scale_of_offsets_is_heeded(name: str, scale: float) -> None:
    model = filled(Layer(name, offset_scale=scale), 0.5)
    gated, given = copy.deepcopy(model), inputs()
    swap_attention(gated, dict(type=PLUG, path='attn'))
    torch.testing.assert_close(gated(*given), model(*given), rtol=1e-4, atol=1e-4)
    gated.attn.offset_scale = 0.5
    assert not torch.allclose(gated(*given), model(*given), atol=1e-3)


# by repository, an option that computes something else and what the refusal says
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ('dino', dict(use_4D_normalizer=True), 'has use_4D_normalizer=True, which moves points by the size of a level'),
    ('rt_detr_v2', dict(method='discrete'), "has method='discrete', and the gates sample bilinearly"),
    ('d_fine', dict(method='discrete'), "has method='discrete', and the gates sample bilinearly"),
    ('d_fine', dict(num_points=[3, 6]), r'has num_points=\[3, 6\], and the gates need one number of points'),
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
