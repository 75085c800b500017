"""Recording reads what the layers compute, changes nothing and leaves nothing behind."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from mmcv.ops import MultiScaleDeformableAttention
from torch import Tensor, nn

import mmgate
from mmgate.analysis.probes.attention import POINTS
from mmgate.analysis.probes.recording import readable, record, require
from mmgate.analysis.probes.statistics import EDGES, Kept, RunningStatistics
from mmgate.errors import ConfigError


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


@pytest.mark.parametrize('training', [False, True], ids=['eval', 'train'])
def test_changes_nothing(training: bool) -> None:
    """Output, gradients and what random numbers are left are the same bits; every reading arrives; no hook stays."""
    found = []
    for records in (False, True):
        model, given = deformable()
        model.train(training)
        torch.manual_seed(1)
        with record(model, [*readable(model), 'activation']) if records else nullcontext({}) as recording:
            output = flat(model(**given))
        if records:
            assert {name for readings in recording.values() for name in readings} == {*POINTS, 'activation'}
        output.square().sum().backward()
        grads = flat([p.grad for p in model.parameters() if p.grad is not None])
        found.append((output, grads, torch.rand(3)))
        assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_refusal_names_what_there_is() -> None:
    message = r'agent maps needs a model with agent tokens .*; ModuleDict has sampling points .*, gates '
    with pytest.raises(ConfigError, match=message):
        require(deformable()[0], ['agents'], 'A picture of agent maps')
    with pytest.raises(ValueError, match='speed cannot be recorded; there are gate, '):
        record(nn.Linear(1, 1), ['speed']).__enter__()


def test_running_statistics_are_numpys() -> None:
    """Over parts of any sizes, with values outside of the histogram and infinite ones."""
    rng = np.random.default_rng(0)
    parts = [rng.normal(0.3, 2.0, size) for size in (1, 100, 7)]
    numbers = np.concatenate(parts)
    statistics = RunningStatistics()
    for part in parts:
        statistics.add(torch.tensor(part))
    statistics.add(torch.tensor([float('nan'), float('inf')]))
    assert statistics.count == 108
    assert statistics.mean == pytest.approx(numbers.mean()) and statistics.deviation == pytest.approx(numbers.std())
    assert statistics.sparsity == pytest.approx((abs(numbers) < 0.1).mean())
    assert (statistics.minimum, statistics.maximum) == (numbers.min(), numbers.max())
    expected, _ = np.histogram(numbers.clip(-4, 4), EDGES)
    assert abs(statistics.histogram - expected).sum() <= 2  # a number on an edge


def test_kept_is_a_copy() -> None:
    kept, doubled, x = Kept(), Kept(lambda x: 2 * x), torch.ones(2)
    for each in (kept, doubled):
        each.add(x)
    x.zero_()
    assert kept.tensors[0].tolist() == [1, 1] and doubled.last.tolist() == [2, 2]
