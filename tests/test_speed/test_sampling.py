"""Deformable attention without a gate on mmgate's operator: the same model, and only where it is faster."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import needs_native, values_and_gradients
from mmcv.ops import MultiScaleDeformableAttention
from torch import Tensor, nn

import mmgate
from mmgate.ops import backend as choice
from mmgate.ops import native
from mmgate.speed import sampling
from mmgate.speed.hooks import SamplingHook
from mmgate.speed.sampling import OperatorAttention

CPU = torch.device('cpu')


class Subclass(MultiScaleDeformableAttention):
    """May compute something else."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        kinds = (MultiScaleDeformableAttention, Subclass, MultiScaleDeformableAttention)
        self.layers = nn.ModuleList([kind(16, 2, 2, 3, dropout=0.0, batch_first=True) for kind in kinds])
        for layer in self.layers:
            for linear in (layer.sampling_offsets, layer.attention_weights):
                nn.init.normal_(linear.weight, std=0.5)

    def forward(self, query: Tensor, points: Tensor, mask: Tensor | None = None) -> Tensor:
        levels = dict(spatial_shapes=torch.tensor([(4, 5), (2, 3)]), level_start_index=torch.tensor([0, 20]))
        for layer in self.layers:
            query = layer(query, value=query, reference_points=points, key_padding_mask=mask, **levels)
        return query


def hooked(model: nn.Module) -> list[str]:
    """Run the hook on a model, and return what it logs."""
    said: list[str] = []
    run: Any = SimpleNamespace(model=model, logger=SimpleNamespace(info=said.append))
    SamplingHook().before_run(run)
    return said


@needs_native
@pytest.mark.parametrize('columns', [2, 4], ids=['points', 'boxes'])
def test_values_gradients_and_names_stay(columns: int) -> None:
    model = Model()
    mmgate.swap_attention(model, dict(path='layers.2', type='PLuGMultiScaleDeformableAttention'))
    model.double()
    inputs = [torch.randn(2, 26, 16).double(), torch.rand(2, 26, 2, columns).double()]
    names = list(model.state_dict())

    def run(*x: Tensor) -> Tensor:
        return model(*x, mask=torch.arange(26) > torch.tensor([[25], [23]]))

    expected = values_and_gradients(run, inputs, range(2))
    weights = {name: p.grad for name, p in model.named_parameters()}
    (said,) = hooked(model)
    assert said.endswith("deformable attention without a gate runs on mmgate's operator ('native'): 1 modules.")
    assert [type(layer).__name__ for layer in model.layers[:2]] == ['OperatorAttention', 'Subclass']
    model.zero_grad()
    torch.testing.assert_close(values_and_gradients(run, inputs, range(2)), expected, rtol=1e-8, atol=1e-9)
    found = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close(found, weights, rtol=1e-8, atol=1e-9)
    assert list(model.state_dict()) == names
    assert 'no deformable attention of mmcv without a gate' in hooked(model)[0], 'a second time there is none left'


@needs_native
def test_it_can_be_recorded_and_gated_afterwards() -> None:
    model = Model()
    hooked(model)
    inputs = torch.randn(2, 26, 16), torch.rand(2, 26, 2, 2)
    with mmgate.record(model, ['weights']) as recording:
        expected = model(*inputs)
    assert recording['layers.0']['weights'].tensors[0].shape == (2, 26, 2, 2, 3)
    mmgate.swap_attention(model, dict(path='layers.0', type='PLuGMultiScaleDeformableAttention'))
    with mmgate.gates_disabled(model):
        torch.testing.assert_close(model(*inputs), expected)
    mmgate.restore_attention(model)
    assert type(model.layers[0]) is OperatorAttention


def test_it_stays_where_the_operator_is_not_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    monkeypatch.setattr(native, 'why_unavailable', lambda: 'it is not compiled')
    said = hooked(model)[0]
    assert said.endswith("stays mmcv's: 'native', which is faster, does not run: it is not compiled.")
    for name, place, changes in (('triton', 'first', True), ('triton', 'in order', False), ('mmcv', 'first', False)):
        backend = choice.Backend(name, torch.square, place=lambda x, place=place: place)
        monkeypatch.setattr(sampling, 'candidates', lambda op, x, backend=backend: ([backend], ''))
        line = sampling.sample_by_operator(deepcopy(model), CPU)
        assert ("runs on mmgate's operator ('triton'): 2 modules." in line) is changes
    monkeypatch.undo()
    line = sampling.sample_by_operator(Model(), torch.device('meta'))
    assert line.endswith("stays mmcv's: on meta mmgate's operator was not measured faster.")
