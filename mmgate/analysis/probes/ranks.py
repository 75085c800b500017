"""Rank of the map K^T V of linear attentions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mmgate.analysis.probes.measures import effective_rank, matrix_rank
from mmgate.analysis.probes.recording import predict, record
from mmgate.analysis.probes.statistics import Kept


def _ranks(maps: Tensor) -> Tensor:
    """Return both ranks of every head, and the most that they can be, ``(3, B H)``; the maps are not kept."""
    ranks = matrix_rank(maps).double()
    return torch.stack([ranks, effective_rank(maps), torch.full_like(ranks, min(maps.shape[-2:]))]).flatten(1)


def kv_ranks(model: nn.Module, batches: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run a model over batches and return a row for every linear attention, in the order in which they run.

    Returns:
        ``layer``; mean and deviation over heads and images of ``matrix_rank``, the paper's, and of ``effective_rank``,
        that of the entropy of singular values, which is ours; ``channels``, the most that a rank can be; where
        there are fewer tokens, it is at most their number.

    Source: SAGA, Figs. 1 and 5.
    """
    with record(model, ['kv'], accumulate=lambda path, name: Kept(_ranks)) as recording:
        for batch in batches:
            predict(model, batch)
    rows = []
    for path, readings in recording.items():
        matrix, effective, channels = torch.cat(readings['kv'].tensors, 1)
        row: dict[str, Any] = dict(layer=path)
        for name, ranks in dict(matrix_rank=matrix, effective_rank=effective).items():
            row.update({name: float(ranks.mean()), f'{name}_std': float(ranks.std(correction=0))})
        rows.append(dict(row, channels=int(channels[-1])))
    return rows
