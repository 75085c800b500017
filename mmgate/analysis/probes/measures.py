"""Steps of attention rollout: normalise the rows of attention maps, and take relevance back through a layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from mmgate.gates.parts.stripes import merge_stripes, split_stripes


def roll_back(relevance: Tensor, weights: Tensor, geometry: Sequence[int] = (), residual: float = 0.5) -> Tensor:
    """Take relevance one layer back, as attention rollout does: from a layer's outputs to its inputs.

    Rows are rolled back one by one, so that no rollout matrix ``(N, N)`` is formed. The sum of relevances stays the
    same, except for the weights on the padding of Swin's windows.

    Args:
        relevance: Relevance of the outputs, ``(..., N)``, for windows and reduced maps ``(h w,)``.
        weights: Attention weights: ``(N, N)``; ``(N, M)`` where PVT reduces keys; ``(nW, n, n)`` for windows. Rows
            that sum to 1 keep the sum of relevances; signed weights give signed relevances.
        geometry: ``(h, w, ratio)`` for PVT, ``(h, w, window, shift)`` for Swin, ``(h, w, wh, ww, shift)`` for windows
            that are not square; empty for a plain map.
        residual: Share of the residual connection.

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
    height, width = relevance.shape
    down, right = window
    padded = F.pad(relevance, (0, -width % right, 0, -height % down))
    size = (padded.shape[0], padded.shape[1])
    tokens = split_stripes(padded.roll((-shift, -shift), (0, 1)).view(1, -1, 1), size, window)  # (nW, n, 1)
    back = merge_stripes(weights.transpose(-1, -2) @ tokens, size, window).view(size)
    return back.roll((shift, shift), (0, 1))[:height, :width].flatten()


def row_shares(weights: Tensor, *, signed: bool = False) -> Tensor:
    """Normalise attention weights so that absolute values sum to 1 in each row; ``signed`` keeps negative signs."""
    shares = F.normalize(weights, p=1, dim=-1)
    return shares if signed else shares.abs()
