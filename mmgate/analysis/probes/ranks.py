"""Rank of the map K^T V of linear attentions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from mmgate.analysis.probes.measures import effective_rank, matrix_rank
from mmgate.analysis.probes.recording import predict, record
from mmgate.analysis.probes.statistics import RunningStatistics


class _Ranks:
    """Ranks over heads and images; the maps themselves are not kept."""

    def __init__(self) -> None:
        self.matrix, self.effective, self.channels = RunningStatistics(), RunningStatistics(), 0

    def add(self, maps: Tensor) -> None:
        self.matrix.add(matrix_rank(maps))
        self.effective.add(effective_rank(maps))
        self.channels = min(maps.shape[-2:])


def kv_ranks(model: nn.Module, batches: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run a model over batches and return a row for every linear attention, in the order in which they run.

    Returns:
        ``layer``; mean and deviation over heads and images of ``matrix_rank``, the paper's, and of ``effective_rank``,
        that of the entropy of singular values, which is ours; ``channels``, the most that a rank can be; where
        there are fewer tokens, it is at most their number.

    Source: SAGA, Figs. 1 and 5.
    """
    with record(model, ['kv'], accumulate=lambda path, name: _Ranks()) as recording:
        for batch in batches:
            predict(model, batch)
    rows = []
    for path, readings in recording.items():
        found = readings['kv']
        ranks = dict(matrix_rank=found.matrix.mean, matrix_rank_std=found.matrix.deviation)
        ranks.update(effective_rank=found.effective.mean, effective_rank_std=found.effective.deviation)
        rows.append(dict(layer=path, **ranks, channels=found.channels))
    return rows
