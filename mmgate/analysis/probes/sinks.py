"""Classify the attention sinks of each head: no-op sinks, which a gate can cure, and broadcast sinks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmgate.analysis.probes.measures import row_shares
from mmgate.analysis.probes.recording import predict, record

# These limits are ours. Share of a head's attention from which its most attended key is a sink.
SINK = 0.3
# Share of a sink over that of uniform attention, in which every one of few keys draws much.
OVER_UNIFORM = 2
# Size of the sink's value, over the mean of the others', below which the sink does nothing.
SMALL = 0.5
# Stable rank of a head's outputs below which all queries receive nearly the same.
LOW_RANK = 2.0
NO_SINK, NO_OP, BROADCAST, UNCLEAR = ('no sink', 'no-op', 'broadcast', 'unclear')


def stable_rank(matrices: Tensor) -> Tensor:
    """Return the stable rank of matrices ``(..., N, d)``: the sum of squared singular values over the largest.

    It is at least 1, or 0 for a matrix of zeros, and hardly changes with singular values that are small beside the
    largest.
    """
    squares = torch.linalg.svdvals(matrices.double()).square()
    largest = squares.amax(-1)
    return squares.sum(-1) / largest.where(largest > 0, torch.ones_like(largest))


def measure_heads(weights: Tensor, values: Tensor) -> Tensor:
    """Measure each head's sink: share of the most attended key, size of its value, rank of the outputs, ``(3, H)``.

    Each is the mean over images (or windows).

    Args:
        weights: Attention weights ``(B, H, N, M)``, which may be signed.
        values: Values ``(B, H|h, M, d)``; ``h`` where several heads share one.

    Returns:
        Share of the attention that the most attended key of a head draws; norm of its value over the mean norm of the
        others', NaN if there are none; stable rank of the outputs ``weights @ values`` over the queries.
    """
    weights = weights.double()
    values = values.double().repeat_interleave(weights.shape[1] // values.shape[1], 1)
    shares, keys = row_shares(weights).mean(2).max(-1, keepdim=True)  # (B, H, 1)
    norms = values.norm(dim=-1)  # (B, H, M)
    own = norms.gather(-1, keys)
    others = (norms.sum(-1, keepdim=True) - own) / (norms.shape[-1] - 1)
    return torch.stack([shares[..., 0].mean(0), (own / others)[..., 0].mean(0), stable_rank(weights @ values).mean(0)])


class _Pairs:
    """Collects attention weights and values of each call, and measures the sinks when both are there.

    Attributes:
        found: Results of :func:`measure_heads`.
        largest: Largest possible rank in the last call.
        uniform: Share of a key in uniform attention in the last call.
    """

    def __init__(self) -> None:
        self.found: list[Tensor] = []
        self.largest = 0
        self.uniform = 0.0
        self._waiting: dict[str, Tensor] = {}

    def half(self, name: str) -> _Half:
        """Return the accumulator for one of the two readings."""
        return _Half(self, name)

    def put(self, name: str, x: Tensor) -> None:
        """Keep a reading of a call; when the other one is there as well, measure the sinks."""
        self._waiting[name] = x.detach()
        if len(self._waiting) == 2:
            weights = self._waiting.pop('attention')
            values = self._waiting.pop('values')
            self.found.append(measure_heads(weights, values).cpu())
            self.largest = min(weights.shape[-2], values.shape[-1])
            self.uniform = 1 / weights.shape[-1]


class _Half:
    def __init__(self, pairs: _Pairs, name: str) -> None:
        self.pairs = pairs
        self.name = name

    def add(self, x: Tensor) -> None:
        self.pairs.put(self.name, x)


def kind_of_sink(share: float, value_norm: float, output_rank: float, uniform: float = 0.0) -> str:
    """Classify a head's sink, by its share, the size of its value and the rank of the outputs.

    Args:
        share: Share of the head's attention on its most attended key.
        value_norm: Norm of that key's value over the mean of the others'.
        output_rank: Stable rank of the head's outputs.
        uniform: Share of a key in uniform attention.

    Returns:
        ``'no sink'``; ``'no-op'``, if the sink's value is small, so that a head that attends to it adds little: the
        kind that gates cure; ``'broadcast'``, if the value is not small and the outputs have a low rank, so that the
        sink hands the same to all queries: the kind that registers are for; or ``'unclear'``.

    Source: A unifying view of attention sinks (Fesser et al., arXiv 2606.08105); the limits are ours.
    """
    if share < max(SINK, OVER_UNIFORM * uniform):
        return NO_SINK
    if value_norm < SMALL:
        return NO_OP
    return BROADCAST if output_rank < LOW_RANK else UNCLEAR


def sink_heads(model: nn.Module, batches: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run a model over batches and return a row with the sink of each attention head, if its values can be read.

    Returns:
        ``layer``, the attention's path; ``head``; ``sink_share``, the share of the head's attention on its most
        attended key; ``uniform``, that of a key in uniform attention; ``value_norm``, the norm of that key's value over
        the mean of the others'; ``output_rank``, the stable rank of the head's outputs, and ``largest_rank``, the
        largest possible; ``kind``, see :func:`kind_of_sink`. Numbers are means over images (or windows), each of which
        has another sink.

    Source: A unifying view of attention sinks (Fesser et al., arXiv 2606.08105).
    """
    pairs: dict[str, _Pairs] = {}

    def accumulate(path: str, name: str) -> _Half:
        return pairs.setdefault(path, _Pairs()).half(name)

    with record(model, ['attention', 'values'], accumulate=accumulate):
        for batch in batches:
            predict(model, batch)
    rows = []
    for path, of_layer in pairs.items():
        if not of_layer.found:
            continue
        for head, numbers in enumerate(torch.stack(of_layer.found).mean(0).T.tolist()):
            share, value_norm, rank = numbers
            row: dict[str, Any] = dict(layer=path, head=head, sink_share=share, uniform=of_layer.uniform)
            row.update(value_norm=value_norm, output_rank=rank, largest_rank=of_layer.largest)
            rows.append(dict(row, kind=kind_of_sink(share, value_norm, rank, of_layer.uniform)))
    return rows


def describe_sinks(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """Describe a model's sinks in lines of text: their number by kind, and each head that has one.

    Args:
        name: Name of the model.
        rows: Rows of :func:`sink_heads`.
    """
    kinds = [row['kind'] for row in rows]
    sinks = [row for row in rows if row['kind'] != NO_SINK]
    lines = [
        f'{name}: {len(sinks)} of {len(rows)} heads have a sink (a key with {SINK} of the attention): '
        f'{kinds.count(NO_OP)} no-op, which gates cure; {kinds.count(BROADCAST)} broadcast, which registers are for; '
        f'{kinds.count(UNCLEAR)} unclear'
    ]
    for row in sinks:
        lines.append(
            f'  {row["layer"]}, head {row["head"]}: {row["kind"]} (share {row["sink_share"]:.2f}, value '
            f"{row['value_norm']:.2f} of the others', rank {row['output_rank']:.1f} of {row['largest_rank']})"
        )
    return '\n'.join(lines)
