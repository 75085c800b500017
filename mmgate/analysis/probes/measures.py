"""Figures computed from attention maps: rollout, dependence, rank, shares."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmgate.layers.stripes import merge_stripes, split_stripes


def roll_back(relevance: Tensor, weights: Tensor, geometry: Sequence[int] = (), residual: float = 0.5) -> Tensor:
    """Take relevances of a layer's outputs to its inputs: rows of the rollout, without its N x N matrices.

    Their sum stays the same, but for what attends to the padding of Swin's windows.

    Args:
        relevance: ``(..., N)``, in windows and reduced maps ``(h w,)``.
        weights: Attention: ``(N, N)``; ``(N, M)`` where PVT reduces keys; ``(nW, n, n)`` of windows. Rows
            that sum to 1 keep the sum of relevances; signed ones stay signed.
        geometry: ``(h, w, ratio)`` of PVT, ``(h, w, window, shift)`` of Swin, ``(h, w, wh, ww, shift)`` of windows that
            are not square; nothing for a plain map.
        residual: Share of the layer's input that passes by.

    Source: Abnar and Zuidema, Quantifying attention flow in transformers (arXiv 2005.00928), Eq. 1.
    """
    if len(geometry) >= 4:
        attended = _windows_back(relevance.view(*geometry[:2]), weights, (geometry[2], geometry[-2]), geometry[-1])
    elif len(geometry) == 3:
        height, width, ratio = geometry
        keys = (relevance @ weights).view(height // ratio, width // ratio) / ratio**2
        spread = keys.repeat_interleave(ratio, 0).repeat_interleave(ratio, 1)
        attended = F.pad(spread, (0, width - spread.shape[1], 0, height - spread.shape[0])).flatten()
    else:
        attended = relevance @ weights
    return residual * relevance + (1 - residual) * attended


def _windows_back(relevance: Tensor, weights: Tensor, window: tuple[int, int], shift: int) -> Tensor:
    (height, width), (down, right) = relevance.shape, window
    padded = F.pad(relevance, (0, -width % right, 0, -height % down))
    size = (padded.shape[0], padded.shape[1])
    tokens = split_stripes(padded.roll((-shift, -shift), (0, 1)).view(1, -1, 1), size, window)  # (nW, n, 1)
    back = merge_stripes(weights.transpose(-1, -2) @ tokens, size, window).view(size)
    return back.roll((shift, shift), (0, 1))[:height, :width].flatten()


def row_shares(weights: Tensor) -> Tensor:
    """Return absolute weights, each row summing to 1: signed maps (M-DGSA) count by their size."""
    return F.normalize(weights, p=1, dim=-1).abs()


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


def alignment(found: np.ndarray) -> np.ndarray:
    """Return the linear centred kernel alignments (CKA) of dependences ``(..., 3)``: mutual, and of each on itself.

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
    return torch.special.entr(shares).sum(-1).exp() * values.any(-1)  # of nothing it is 0, not exp(0)


def key_shares(weights: Tensor) -> Tensor:
    """Return each key's share of the attention ``(B, H, N, M)`` of a head, mean over queries, ``(B, H, M)``.

    Signed weights count by their size; a uniform attention gives ``1 / M``.
    """
    return row_shares(weights.float()).mean(2)
