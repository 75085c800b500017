"""Figures computed from attention maps: rollout, CKA, rank, the sink."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def rollout(maps: Sequence[Tensor], residual: float = 0.5) -> Tensor:
    """Return ``(N, N)``: how much of each input token reaches each output token through layers of attention.

    Args:
        maps: Attention weights ``(N, N)`` of each layer, first layer first, heads averaged.
        residual: Share of the layer's input that passes by the attention.

    Source: Abnar and Zuidema, Quantifying attention flow in transformers (arXiv 2005.00928), Eq. 1.
    """
    identity = torch.eye(maps[0].shape[-1], dtype=maps[0].dtype)
    found = identity
    for weights in maps:
        found = (residual * identity + (1 - residual) * row_shares(weights)) @ found
    return found


def roll_back(relevance: Tensor, weights: Tensor, geometry: Sequence[int] = (), residual: float = 0.5) -> Tensor:
    """Take relevances of a layer's outputs to its inputs.

    Their sum stays the same, but for what attends to the padding of Swin's windows. One row of :func:`rollout` without
    the matrices: Swin's and PVT's layers have no N x N map.

    Args:
        relevance: ``(h, w)`` over the layer's map.
        weights: Attention, heads averaged: ``(N, N)``; ``(N, M)`` where PVT reduces keys; ``(nW, n, n)`` of windows.
        geometry: ``(h, w, ratio)`` of PVT, ``(h, w, window, shift)`` of Swin, ``(h, w, wh, ww, shift)`` of windows that
            are not square; nothing for a plain map.
        residual: Share of the layer's input that passes by.
    """
    height, width = relevance.shape
    shares = row_shares(weights)
    if len(geometry) >= 4:
        attended = _windows_back(relevance, shares, (int(geometry[2]), int(geometry[-2])), int(geometry[-1]))
    elif len(geometry) == 3 and geometry[2] > 1:
        ratio = int(geometry[2])
        keys = (relevance.flatten() @ shares).view(height // ratio, width // ratio) / ratio**2
        spread = keys.repeat_interleave(ratio, 0).repeat_interleave(ratio, 1)
        attended = F.pad(spread, (0, width - spread.shape[1], 0, height - spread.shape[0]))
    else:
        attended = (relevance.flatten() @ shares).view(height, width)
    return residual * relevance + (1 - residual) * attended


def _windows_back(relevance: Tensor, weights: Tensor, window: tuple[int, int], shift: int) -> Tensor:
    (height, width), (down, right) = relevance.shape, window
    padded = F.pad(relevance, (0, -width % right, 0, -height % down))
    rows, columns = padded.shape[0] // down, padded.shape[1] // right
    rolled = padded.roll((-shift, -shift), (0, 1))
    tokens = rolled.view(rows, down, columns, right).transpose(1, 2).reshape(-1, 1, down * right)
    back = (tokens @ weights).view(rows, columns, down, right).transpose(1, 2).reshape(padded.shape)
    return back.roll((shift, shift), (0, 1))[:height, :width]


def row_shares(weights: Tensor) -> Tensor:
    """Return absolute weights, each row summing to 1: signed maps (M-DGSA) count by their size."""
    sizes = weights.abs()
    return sizes / sizes.sum(-1, keepdim=True).clamp(min=1e-12)


def pixel_centres(levels: Sequence[tuple[int, int]]) -> Tensor:
    """Return the centres of the pixels of every level, ``(height, width)``, as (x, y) from 0 to 1, ``(S, 2)``."""
    grids = [torch.meshgrid((torch.arange(h) + 0.5) / h, (torch.arange(w) + 0.5) / w, indexing='ij') for h, w in levels]
    return torch.cat([torch.stack([x, y], -1).view(-1, 2) for y, x in grids])


def dependence(x: Tensor, y: Tensor) -> float:
    """Return the Hilbert-Schmidt independence criterion of ``(n, p)`` and ``(n, q)`` with linear kernels, unbiased.

    The biased one grows with the width: maps of unrelated layers would look alike as soon as they have more keys than
    queries. NaN for fewer than four rows.

    Source: Song et al., Feature selection via dependence maximization (JMLR 13, 2012), Eq. 5.
    """
    return _dependence(_kernel(x), _kernel(y))


def dependences(x: Tensor, y: Tensor) -> tuple[float, float, float]:
    """Return the :func:`dependence` of two matrices on each other, and of each on itself."""
    one, other = _kernel(x), _kernel(y)
    return _dependence(one, other), _dependence(one, one), _dependence(other, other)


def _kernel(x: Tensor) -> Tensor:
    """Return the products of different rows, centred: shifting all alike changes nothing but the rounding."""
    centred = x.double() - x.double().mean(0)
    return (centred @ centred.T).fill_diagonal_(0)


def _dependence(one: Tensor, other: Tensor) -> float:
    count = len(one)
    if count < 4:
        return float('nan')
    found = (one * other).sum() + one.sum() * other.sum() / ((count - 1) * (count - 2))
    return float((found - 2 / (count - 2) * (one.sum(0) @ other.sum(0))) / (count * (count - 3)))


def linear_cka(x: Tensor, y: Tensor) -> float:
    """Return the linear centred kernel alignment of ``(n, p)`` and ``(n, q)``: 1 for equal up to rotation and scale.

    It is that of the unbiased dependences, which is 0 on average for unrelated matrices, and may be less. Constant
    matrices have no alignment: NaN.

    Source: Kornblith et al., Similarity of neural network representations revisited (arXiv 1905.00414), section 3;
    Nguyen et al., Do wide and deep networks learn the same things? (arXiv 2010.15327), Eq. 3.
    """
    return float(alignment(np.array(dependences(x, y))))


def alignment(found: np.ndarray) -> np.ndarray:
    """Return the kernel alignments of :func:`dependences` ``(..., 3)``; NaN where one of the two depends on nothing."""
    mutual, own, other = np.moveaxis(found, -1, 0)
    return mutual / np.sqrt(np.where(own * other > 0, own * other, np.nan))


def numerical_rank(matrices: Tensor, tolerance: float = 0.01) -> Tensor:
    """Return how many singular values exceed ``tolerance`` times the largest, of ``(..., d, d)``."""
    values = torch.linalg.svdvals(matrices.double())
    return (values > tolerance * values[..., :1].clamp(min=1e-300)).sum(-1)


def effective_rank(matrices: Tensor) -> Tensor:
    """Return ``exp`` of the entropy of the singular values' shares, of ``(..., d, d)``; needs no tolerance.

    Source: Roy and Vetterli, The effective rank (EUSIPCO 2007), Definition 1.
    """
    values = torch.linalg.svdvals(matrices.double())
    shares = values / values.sum(-1, keepdim=True).clamp(min=1e-300)
    return torch.special.entr(shares).sum(-1).exp()


def sink_share(weights: Tensor) -> tuple[float, int]:
    """Return the share of attention on the most attended key of ``(B, H, N, M)``, and that key's number.

    Rows, heads and images are averaged first; a uniform attention gives ``1 / M``.

    Source: Gated attention for large language models, section 4.3 (there the first token).
    """
    shares = row_shares(weights.float()).mean((0, 1, 2))
    return float(shares.max()), int(shares.argmax())
