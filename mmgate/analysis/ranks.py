"""Rank of the map K^T V of linear attentions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from .accumulators import RunningStatistics
from .maps import effective_rank, numerical_rank
from .recording import record
from .subjects import predict


class _Ranks:
    """Ranks over heads and images; the maps themselves are not kept."""

    def __init__(self) -> None:
        self.effective, self.numerical, self.channels = RunningStatistics(), RunningStatistics(), 0

    def add(self, maps: Tensor) -> None:
        self.effective.add(effective_rank(maps))
        self.numerical.add(numerical_rank(maps))
        self.channels = maps.shape[-1]


def kv_ranks(model: nn.Module, batches: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run a model over batches and return a row for every linear attention, in the order in which they run.

    Returns:
        ``layer``; ``effective_rank`` and ``std``, over heads and images; ``rank_at_1_percent``, the mean number of
        singular values above 1 % of the largest; ``channels``, the most that a rank can be.

    Source: SAGA, Fig. 1 and 5.
    """
    with record(model, ['kv'], accumulate=_Ranks) as recording:
        for batch in batches:
            predict(model, batch)
    rows = []
    for path, readings in recording.items():
        found = readings['kv']
        figures = dict(effective_rank=found.effective.mean, std=found.effective.deviation)
        rows.append(dict(layer=path, **figures, rank_at_1_percent=found.numerical.mean, channels=found.channels))
    return rows
