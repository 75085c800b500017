"""Figures computed from attention maps: rollout, dependence, rank, shares."""

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
        weights: Attention: ``(N, N)``; ``(N, M)`` where PVT reduces keys; ``(nW, n, n)`` of windows. Rows
            that sum to 1 keep the sum of relevances; signed ones stay signed.
        geometry: ``(h, w, ratio)`` of PVT, ``(h, w, window, shift)`` of Swin, ``(h, w, wh, ww, shift)`` of windows that
            are not square; nothing for a plain map.
        residual: Share of the layer's input that passes by.
    """
    height, width = relevance.shape
    if len(geometry) >= 4:
        attended = _windows_back(relevance, weights, (int(geometry[2]), int(geometry[-2])), int(geometry[-1]))
    elif len(geometry) == 3 and geometry[2] > 1:
        ratio = int(geometry[2])
        keys = (relevance.flatten() @ weights).view(height // ratio, width // ratio) / ratio**2
        spread = keys.repeat_interleave(ratio, 0).repeat_interleave(ratio, 1)
        attended = F.pad(spread, (0, width - spread.shape[1], 0, height - spread.shape[0]))
    else:
        attended = (relevance.flatten() @ weights).view(height, width)
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


def products(x: Tensor) -> Tensor:
    """Return the products ``(n, n)`` of different rows of ``(n, p)``, centred: a shift of all changes but rounding."""
    centred = x.double() - x.double().mean(0)
    return (centred @ centred.T).fill_diagonal_(0)


def dependence_of(one: Tensor, other: Tensor) -> float:
    """Return the Hilbert-Schmidt independence criterion of two matrices' :func:`products`, unbiased.

    The biased one grows with the width: maps of unrelated layers would look alike as soon as they have more keys than
    queries. NaN for fewer than four rows.

    Source: Song et al., Feature selection via dependence maximization (JMLR 13, 2012), Eq. 5.
    """
    count = len(one)
    if count < 4:
        return float('nan')
    found = (one * other).sum() + one.sum() * other.sum() / ((count - 1) * (count - 2))
    return float((found - 2 / (count - 2) * (one.sum(0) @ other.sum(0))) / (count * (count - 3)))


def dependences(x: Tensor, y: Tensor) -> tuple[float, float, float]:
    """Return the :func:`dependence_of` ``(n, p)`` and ``(n, q)`` on each other, and of each on itself."""
    one, other = products(x), products(y)
    return dependence_of(one, other), dependence_of(one, one), dependence_of(other, other)


def alignment(found: np.ndarray) -> np.ndarray:
    """Return the linear centred kernel alignments (CKA) of :func:`dependences` ``(..., 3)``.

    1 for matrices that are equal up to rotation and scale, 0 on average for unrelated ones, which may be less; NaN
    where one of the two is constant.

    Source: Kornblith et al., Similarity of neural network representations revisited (arXiv 1905.00414), section 3;
    Nguyen et al., Do wide and deep networks learn the same things? (arXiv 2010.15327), Eq. 3.
    """
    mutual, own, other = np.moveaxis(found, -1, 0)
    return mutual / np.sqrt(np.where(own * other > 0, own * other, np.nan))


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
    return torch.special.entr(shares).sum(-1).exp()


def key_shares(weights: Tensor) -> Tensor:
    """Return each key's share of the attention ``(B, H, N, M)`` of a head, mean over queries and images, ``(H, M)``.

    Signed weights count by their size; a uniform attention gives ``1 / M``.
    """
    return row_shares(weights.float()).mean((0, 2))
