"""What attentions do by layer: how much one token draws, how large hidden states become, the rank of K^T V."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmgate.analysis.probes.attention import GATES
from mmgate.analysis.probes.measures import row_shares
from mmgate.analysis.probes.recording import ACTIVATION, class_tokens, nearest, predict, record
from mmgate.analysis.probes.statistics import Kept, RunningStatistics

NAN = float('nan')


def _shares(weights: Tensor) -> Tensor:
    shares, keys = row_shares(weights.float()).mean(2), weights.shape[-1]  # (B, H, M), of images or of windows
    mean = shares.mean(1)
    most, head = mean.amax(-1).mean(), shares.amax((1, 2)).mean()
    return torch.stack([most, head, mean[:, 0].mean(), mean.new_tensor(1 / keys), mean.new_tensor(keys)])


def _activations(states: Tensor) -> Tensor:
    sizes = states.float().abs().nan_to_num(0.0, torch.inf)  # no number comes of a row without a key
    return torch.stack([sizes.max(), sizes[:, 0].max()])


_REDUCED = {'attention': _shares, ACTIVATION: _activations}


def _accumulate(path: str, name: str) -> Any:
    return Kept(_REDUCED[name]) if name in _REDUCED else RunningStatistics()


def sinks(model: nn.Module, batches: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run a model over batches and return a row for every attention with weights or a gate, as they run.

    Returns:
        ``layer``; ``sink_share``, that of attention on the most attended key of an image or a window, mean over them;
        ``largest_head_share``, that of the head in which it is largest: a sink of one head fades in the mean over
        heads; ``first_token_share``, that on the class token, mean over heads and images: the study's first-token
        score; ``uniform``, what a share would be if attention were uniform; ``maximum_activation``, the largest
        absolute value of the hidden states after the layer, and ``first_token_activation``, of the first token alone;
        ``gate_sparsity``, the share of the gate's values near 0. NaN is what a layer does not have.

    Source: Gated attention for large language models, section 4.3.
    """
    with record(model, [*GATES, *_REDUCED], accumulate=_accumulate) as recording:
        for batch in batches:
            predict(model, batch)
    with_weights = {path: of['attention'] for path, of in recording.items() if 'attention' in of}
    extra = class_tokens(model, {path: int(shares.last[-1]) for path, shares in with_weights.items()})
    rows = []
    for path, readings in recording.items():
        gates = [readings[name].sparsity for name in GATES if name in readings]
        if path not in with_weights and not gates:
            continue
        share = head = first = uniform = largest = of_first = NAN
        if path in with_weights:
            share, head, first, uniform, _ = torch.stack(with_weights[path].tensors).mean(0).tolist()
        states = nearest(recording, path, ACTIVATION)
        if states is not None:
            largest, of_first = torch.stack(states.tensors).amax(0).tolist()
        if path not in extra:
            first = of_first = NAN
        row = dict(layer=path, sink_share=share, largest_head_share=head, first_token_share=first, uniform=uniform)
        row.update(maximum_activation=largest, first_token_activation=of_first)
        rows.append(dict(row, gate_sparsity=float(np.mean(gates)) if gates else NAN))
    return rows


def matrix_rank(matrices: Tensor) -> Tensor:
    """Return the rank of ``(..., d, e)`` as linear algebra has it: singular values that rounding does not explain.

    Those count that exceed the largest times the longer side times the precision of the matrices' dtype, numpy's and
    Matlab's rule; SAGA names no other.

    Source: SAGA, Figs. 1 and 5.
    """
    precision = torch.finfo(matrices.dtype).eps  # in float64 the rounding of float32 would look like full rank
    return torch.linalg.matrix_rank(matrices.double(), rtol=max(matrices.shape[-2:]) * precision)


def effective_rank(matrices: Tensor) -> Tensor:
    """Return ``exp`` of the entropy of the singular values' shares, of ``(..., d, d)``; needs no tolerance.

    Source: Roy and Vetterli, The effective rank (EUSIPCO 2007), Definition 1.
    """
    values = torch.linalg.svdvals(matrices.double())
    shares = values / values.sum(-1, keepdim=True).clamp(min=1e-300)
    return torch.special.entr(shares).sum(-1).exp() * values.any(-1)  # of nothing it is 0, not exp(0)


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
