"""Measure each layer of a model: its attention sinks, its largest hidden state, and the rank of ``K^T V``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmgate.analysis.probes.gates import RunningStatistics
from mmgate.analysis.probes.recording import ACTIVATION, class_tokens, nearest, predict, record
from mmgate.analysis.probes.relevance import row_shares
from mmgate.notes import GATES, Kept, Note

NAN = float('nan')


def _shares(weights: Tensor) -> Tensor:
    shares = row_shares(weights.float()).mean(2)  # (B, H, M), of images or of windows
    keys = shares.shape[-1]
    mean = shares.mean(1)
    most = mean.amax(-1).mean()
    head = shares.amax((1, 2)).mean()
    return torch.stack([most, head, mean[:, 0].mean(), mean.new_tensor(1 / keys), mean.new_tensor(keys)])


def _activations(states: Tensor) -> Tensor:
    # A row without a key is NaN.
    sizes = states.float().abs().nan_to_num(0.0, torch.inf)
    return torch.stack([sizes.max(), sizes[:, 0].max()])


_REDUCED = {'attention': _shares, ACTIVATION: _activations}


def _accumulate(first: Note) -> Kept | RunningStatistics:
    return Kept(_REDUCED[first.name]) if first.name in _REDUCED else RunningStatistics()


def sinks(model: nn.Module, batches: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run a model over batches and return a row of sink measures for each attention, in the order in which they run.

    Returns:
        ``layer``, its path; ``sink_share``, the share of attention on the most attended key, mean over images (or
        windows); ``largest_head_share``, the same in the head where it is largest, because a sink of one head fades in
        the mean over heads; ``first_token_share``, the share on the class token, mean over heads and images (the
        study's first-token score); ``uniform``, the share of a key in uniform attention; ``maximum_activation``, the
        largest absolute value of the hidden states after the layer, and ``first_token_activation``, that of the first
        token; ``gate_sparsity``, the share of the gate's values near 0. A value that a layer does not have is NaN.

    Source: Gated attention for large language models, section 4.3.
    """
    with record(model, [GATES, *_REDUCED], accumulate=_accumulate) as recording:
        for batch in batches:
            predict(model, batch)
    keys = {path: int(notes['attention'].last[-1]) for path, notes in recording.items() if 'attention' in notes}
    extra = class_tokens(model, keys)
    rows = []
    for path, notes in recording.items():
        gates = [found.sparsity for name, found in notes.items() if name not in _REDUCED]
        if path not in keys and not gates:
            continue
        share, head, first, uniform, _ = (
            torch.stack(notes['attention'].tensors).mean(0).tolist() if path in keys else [NAN] * 5
        )
        states = nearest(recording, path, ACTIVATION)
        largest, of_first = [NAN, NAN] if states is None else torch.stack(states.tensors).amax(0).tolist()
        row = dict(layer=path, sink_share=share, largest_head_share=head)
        row.update(first_token_share=first if path in extra else NAN, uniform=uniform, maximum_activation=largest)
        row.update(first_token_activation=of_first if path in extra else NAN)
        rows.append(dict(row, gate_sparsity=float(np.mean(gates)) if gates else NAN))
    return rows


def matrix_rank(matrices: Tensor) -> Tensor:
    """Return the rank of matrices ``(..., d, e)``: the number of singular values larger than rounding errors.

    A singular value counts if it exceeds the largest times the longer side times the precision of the matrices' dtype.
    This is the rule of numpy and Matlab; SAGA names no other.

    Source: SAGA, Figs. 1 and 5.
    """
    # By float64's precision the rounding of float32 would look like full rank.
    precision = torch.finfo(matrices.dtype).eps
    return torch.linalg.matrix_rank(matrices.double(), rtol=max(matrices.shape[-2:]) * precision)


def effective_rank(matrices: Tensor) -> Tensor:
    """Return the effective rank of matrices ``(..., d, d)``: exp of the entropy of their normalised singular values.

    It needs no tolerance.

    Source: Roy and Vetterli, The effective rank (EUSIPCO 2007), Definition 1.
    """
    values = torch.linalg.svdvals(matrices.double())
    shares = values / values.sum(-1, keepdim=True).clamp(min=1e-300)
    # A matrix of zeros has rank 0, not exp(0).
    return torch.special.entr(shares).sum(-1).exp() * values.any(-1)


def _ranks(maps: Tensor) -> Tensor:
    """Return matrix rank, effective rank and largest possible rank of every head's ``K^T V``, ``(3, B H)``."""
    ranks = matrix_rank(maps).double()
    return torch.stack([ranks, effective_rank(maps), torch.full_like(ranks, min(maps.shape[-2:]))]).flatten(1)


def kv_ranks(model: nn.Module, batches: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run a model over batches and return a row with the rank of ``K^T V`` for each linear attention, in their order.

    Returns:
        ``layer``, its path; mean and deviation over heads and images of ``matrix_rank``, the paper's measure, and of
        ``effective_rank``, which we add; ``channels``, the largest possible rank (a map of fewer tokens has at most
        the rank of their number).

    Source: SAGA, Figs. 1 and 5.
    """
    with record(model, ['kv'], accumulate=lambda first: Kept(_ranks)) as recording:
        for batch in batches:
            predict(model, batch)
    rows = []
    for path, notes in recording.items():
        matrix, effective, channels = torch.cat(notes['kv'].tensors, 1)
        row: dict[str, Any] = dict(layer=path)
        for name, ranks in dict(matrix_rank=matrix, effective_rank=effective).items():
            row.update({name: float(ranks.mean()), f'{name}_std': float(ranks.std(correction=0))})
        rows.append(dict(row, channels=int(channels[-1])))
    return rows
