"""Recording reads what the layers compute, changes nothing and leaves nothing behind."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.gated_layers import gated
from helpers.given_attention import Model
from mmcv.ops import MultiScaleDeformableAttention
from mmdet.models.backbones.pvt import SpatialReductionAttention
from mmdet.models.backbones.swin import ShiftWindowMSA
from mmseg.models.backbones.twins import LocallyGroupedSelfAttention
from torch import Tensor, nn

import mmgate
from mmgate import note
from mmgate.analysis.probes.gates import gate_statistics, mean_maps
from mmgate.analysis.probes.layers import sinks
from mmgate.analysis.probes.recording import best_queries, class_tokens, map_shape, record, require
from mmgate.errors import ConfigError
from mmgate.gates import SDPAGate
from mmgate.notes import POINTS


def deformable() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.ModuleDict(dict(a=MultiScaleDeformableAttention(16, 2, 2, 3, batch_first=True, dropout=0.1)))
    model.forward = lambda **given: model['a'](**given)  # type: ignore[method-assign]
    mmgate.swap_attention(model, dict(path='a', type='PLuGMultiScaleDeformableAttention', init='paper'))
    nn.init.normal_(model['a'].sampling_offsets.weight)
    nn.init.normal_(model['a'].attention_weights.weight)
    given = dict(query=torch.randn(2, 5, 16), value=torch.randn(2, 30, 16), query_pos=torch.randn(2, 5, 16))
    given.update(reference_points=torch.rand(2, 5, 2, 2), spatial_shapes=torch.tensor([[4, 6], [2, 3]]))
    return model, {**given, 'level_start_index': torch.tensor([0, 24])}


def flat(output: Any) -> Tensor:
    return torch.cat([x.flatten() for x in (output if isinstance(output, (tuple, list)) else [output])])


TOKENS, MAP = torch.zeros(1, 24, 16), (4, 6)
PLACES: dict[str, tuple[nn.Module, list[int]]] = {
    'windows': (ShiftWindowMSA(16, 2, 4, shift_size=2), [4, 6, 4, 2]),
    'reduced keys': (SpatialReductionAttention(16, 2, sr_ratio=2), [4, 6, 2]),
    'grouped': (LocallyGroupedSelfAttention(16, 2, window_size=3), [4, 6, 3, 0]),
}


@pytest.mark.parametrize('name', PLACES)
def test_a_call_tells_where_windows_and_reduced_keys_lie(name: str) -> None:
    module, expected = PLACES[name]
    with record(module, ['geometry']) as recording:
        module(TOKENS, MAP)
    assert recording['']['geometry'].last.tolist() == expected
    assert not any(part._forward_hooks for part in module.modules())


def test_attention_over_the_whole_map_tells_its_place_itself() -> None:
    model = nn.ModuleList([ShiftWindowMSA(16, 2, 4, shift_size=2)])
    mmgate.swap_attention(model, dict(path='0', type='AgentAttention', map_size=MAP, agent_num=4))
    with record(model) as recording:
        model[0](TOKENS, MAP)
    assert [found.tolist() for found in recording['0']['geometry'].tensors] == [[4, 6, 1]]
    with mmgate.gates_disabled(model), record(model) as recording:
        model[0](TOKENS, MAP)
    assert [found.tolist() for found in recording['0']['geometry'].tensors] == [[4, 6, 4, 2]]


def test_a_map_has_the_shape_that_a_stride_makes() -> None:
    """Of padded images exactly, of others with the last row and column rounded up or left out."""
    for tokens, expected in ((16700, (100, 167)), (1050, (25, 42)), (49, None), (50 * 83, (50, 83))):
        assert map_shape(tokens, (800, 1333)) == expected


@pytest.mark.parametrize('training', [False, True], ids=['eval', 'train'])
def test_recording_changes_nothing(training: bool) -> None:
    """Output, gradients and what random numbers are left are the same bits; every note arrives; no hook stays."""
    found = []
    for records in (False, True):
        model, given = deformable()
        model.train(training)
        torch.manual_seed(1)
        with record(model, [*POINTS, 'gate', 'activation']) if records else nullcontext({}) as recording:
            output = flat(model(**given))
        if records:
            assert {name for readings in recording.values() for name in readings} == {*POINTS, 'gate', 'activation'}
        output.square().sum().backward()
        grads = flat([p.grad for p in model.parameters() if p.grad is not None])
        found.append((output, grads, torch.rand(3)))
        assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_refusal_names_what_there_is() -> None:
    model, given = deformable()
    model.test_step = lambda batch: [model(**batch)]
    message = r'agent maps needs a model with agent tokens .*; ModuleDict has gates .*, sampling points '
    with pytest.raises(ConfigError, match=message):
        require(model, given, ['agents'], 'A picture of agent maps')
    require(model, given, ['agents', 'gates'], 'A picture of agent maps')


class Tempered(SDPAGate):
    """A gate of a user, which notes one more number, by a name that no gate of mmgate has."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, inputs: Any, bias: Tensor | None) -> Tensor:
        note(self, 'temperature', lambda: 7 + torch.zeros(1, self.num_heads, 1, 1), 'heads', unchanged=6.5)
        return super().attend(query, key, value, inputs, bias)


def test_every_note_of_a_strangers_gate_reaches_figures() -> None:
    """By its name, and with all others of gates, in statistics, maps and rows."""
    model, batches = gated(dict(type=Tempered))
    for wanted in (['temperature'], ['gates']):
        with record(model, wanted) as recording:
            model.test_step(batches[0])
        assert {name for found in recording.values() for name in found} == {
            'temperature',
            *(['gate'] * ('gates' in wanted)),
        }
        assert recording['0']['temperature'].last.unique() == 7
    statistics = gate_statistics(model, batches)
    assert {(gate.path, gate.name, gate.unchanged) for gate in statistics} == {
        ('0', 'gate', 1), ('0', 'temperature', 6.5), ('1', 'gate', 1), ('1', 'temperature', 6.5)
    }  # fmt: skip
    assert {gate.row()['moved'] for gate in statistics if gate.name == 'temperature'} == {0.5}
    maps = {found.name: found.values for found in mean_maps(statistics)}
    assert maps['temperature'].tolist() == [[7, 7], [7, 7]] and 0 < maps['gate'].max() < 1
    assert {row['reading'] for found in mean_maps(statistics) for row in found.rows()} == set(maps)
    assert [row['gate_sparsity'] for row in sinks(model, batches)] == [0, 0]


def test_class_tokens_join_where_they_join() -> None:
    """T2T-ViT's first attentions have none; DeiT's distillation token is one more."""
    model = nn.ModuleDict(dict(backbone=Model(), neck=nn.Identity()))
    keys = {'backbone.tokens.0': 64, 'backbone.layers.0': 17, 'backbone.layers.1': 17, 'neck': 17}
    assert class_tokens(model, keys) == {'backbone.layers.0': 1, 'backbone.layers.1': 1}
    model['backbone'].num_extra_tokens = 2
    assert set(class_tokens(model, keys).values()) == {2}
    model['backbone'].with_cls_token = False  # mmseg's ViT keeps the parameter
    assert not class_tokens(model, keys)


def test_best_queries_are_those_of_the_best_class() -> None:
    recording = kept(scores=torch.tensor([[[0.1, 0.2], [0.9, 0.0], [0.3, 0.4]]]), places=torch.zeros(1, 3, 4))
    assert best_queries(dict(bbox_head=recording['layer']), 0, 2).tolist() == [1, 2]
    assert best_queries({}, 0, 2).tolist() == [0, 1]


def kept(**readings: torch.Tensor) -> dict[str, dict[str, Any]]:
    """Return a recording of one layer."""
    return dict(layer={name: SimpleNamespace(last=x) for name, x in readings.items()})
