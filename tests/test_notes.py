"""Notes reach the recorders of their thread, and nobody else."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from conftest import noted_graph
from torch import Tensor, nn

from mmgate import note, record
from mmgate.notes import with_note


class Attention(nn.Module):
    """A stranger's attention, which notes its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        return (query @ key.mT).softmax(-1)

    def forward(self, x: Tensor, axes: str = '') -> Tensor:
        query = self.proj(x)
        note(self, 'attention', lambda: self.weights(query, x), axes)
        return query


class Counting(Attention):
    """The same; it counts how often it forms them."""

    formed = 0

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        self.formed += 1
        return super().weights(query, key)


def test_a_note_is_formed_once_for_all_who_take_it_and_for_none_otherwise() -> None:
    model, given = nn.Sequential(Counting()), [torch.randn(2, 3, 4) for _ in range(2)]
    model(given[0])
    with record(model, 'values') as recording:
        model(given[0])
    assert model[0].formed == 0 and not recording
    with record(model) as one, record(model, ['attention'], graph=True) as other:
        _, asked = with_note(model[0], 'attention', lambda: model(given[0]))
        model(given[1])
    assert model[0].formed == 2
    kept, with_graph = (recording['0']['attention'].tensors for recording in (one, other))
    assert len(kept) == len(with_graph) == 2 and asked is not None
    assert [x.requires_grad for x in (kept[0], with_graph[0], asked)] == [False, True, True]
    for x, *found in zip(given, kept, with_graph, strict=True):
        expected = model[0].weights(model[0].proj(x), x)
        assert all(torch.equal(weights, expected) for weights in found)
    assert torch.equal(asked, kept[0]) and torch.equal(one['0']['attention'].last, kept[1])
    assert with_note(model[0], 'values', lambda: model(given[0]))[1] is None


def test_what_another_model_notes_is_not_taken() -> None:
    model, other, x = Counting(), Counting(), torch.randn(2, 3, 4)
    with record(model) as recording:
        other(x)
    assert not recording and not other.formed


def test_axes_that_no_figure_knows_are_refused() -> None:
    model = Attention()
    with record(model), pytest.raises(ValueError, match="Attention notes 'attention' with the axes 'head'; choose one"):
        model(torch.randn(2, 3, 4), axes='head')
    with record(model, 'gates') as recording:
        model(torch.randn(2, 3, 4))
        model(torch.randn(2, 3, 4), axes='pairs')
    assert len(recording['']['attention'].tensors) == 1


class Asking(nn.Module):
    """An attention that returns the weights that its part notes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, x: Tensor) -> Any:
        return with_note(self.inner, 'attention', lambda: self.inner(x))


@noted_graph
@pytest.mark.parametrize('kind', [Attention, Asking])
def test_notes_break_no_graph(kind: type[nn.Module]) -> None:
    """Inside a compiled graph nothing is recorded, nothing compiled anew for a recorder, and weights are returned."""
    model, x, graphs = kind(), torch.randn(2, 3, 4), []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=counting)
    for names in ([], ['attention'], ['attention']):
        with record(model, names) if names else nullcontext() as recording:
            found = compiled(x)
        assert not recording
        torch.testing.assert_close(found, model(x))
    assert len(graphs) == 1
