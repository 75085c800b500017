"""Compute which places of an image matter to a model's output, by attention rollout, or to one layer's heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.analysis.probes.recording import (
    GEOMETRY,
    class_tokens,
    map_shape,
    nearest,
    padded_size,
    predict,
    record,
)
from mmgate.errors import ConfigError
from mmgate.gates.parts.stripes import merge_stripes, split_stripes
from mmgate.notes import Kept, Recording


def row_shares(weights: Tensor, *, signed: bool = False) -> Tensor:
    """Normalise attention weights so that absolute values sum to 1 in each row; ``signed`` keeps negative signs."""
    shares = F.normalize(weights, p=1, dim=-1)
    return shares if signed else shares.abs()


def head_mean(weights: Tensor, *, absolute: bool = False) -> Tensor:
    """Normalise the rows of attention weights ``(B, H, N, M)`` and average them over the heads, ``(B, N, M)``.

    Shares of signed weights (M-DGSA) keep their signs, as in the paper's Fig. 3: inhibition is below 0, and heads that
    disagree cancel out. With ``absolute`` the absolute values are averaged.
    """
    return row_shares(weights.float(), signed=not absolute).mean(1)


def shares_of(relevance: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """Normalise relevances so that their absolute values sum to 1 over the axes ``dims``; all zeros stay zeros."""
    return relevance / relevance.abs().sum(dims, keepdim=True).clamp(min=1e-12)


def query_rows(weights: Tensor) -> Tensor:
    """Return the first row (a class token's) and the mean row of weights ``(B, H, N, M)``, stacked ``(2, B, H, M)``."""
    return torch.stack([weights[:, :, 0], weights.mean(2)]).float()


def record_maps(model: nn.Module, reduce: Callable[[Tensor], Tensor] = head_mean) -> AbstractContextManager[Recording]:
    """Return a context that records attention maps (by default means over heads) and their layout."""
    names = ('attention', GEOMETRY)
    return record(model, names, accumulate=lambda first: Kept(reduce) if first.name == 'attention' else Kept())


def placed_maps(recording: Recording) -> list[tuple[str, Tensor, tuple[int, ...] | None]]:
    """Return for each recorded attention its path, its last map, and the layout of its tokens on the image, or None."""
    found = []
    for path, notes in recording.items():
        if 'attention' in notes:
            geometry = nearest(recording, path, GEOMETRY)
            found.append((path, notes['attention'].last, geometry and tuple(geometry.last.tolist())))
    return found


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


def relevance_map(model: nn.Module, recording: Recording, size: tuple[int, int]) -> Tensor:
    """Return by attention rollout how much each place of an image contributes to the last layer's tokens, ``(h, w)``.

    Absolute values sum to 1; inhibition, in M-DGSA's signed maps, is below 0. With a class token it is the relevance to
    that token. Only self-attention over the image counts: the backbone's, if it has any, else the encoder's. Height
    and width of plain attention's map follow from ``size``, that of the padded image.

    Raises:
        ConfigError: There is no self-attention over the image.
    """
    found = placed_maps(recording)
    placed = [(maps, geometry) for _, maps, geometry in found if geometry is not None]
    if placed:
        shape = placed[-1][1][:2]
        relevance = torch.ones(shape[0] * shape[1])
        for weights, geometry in reversed(placed):
            if shape != geometry[:2]:  # patches were merged in between
                before = relevance.view(1, 1, *shape)
                shape = geometry[:2]
                relevance = F.interpolate(before, size=shape, mode='bilinear').flatten()
            relevance = roll_back(relevance, weights if len(geometry) >= 4 else weights[0], geometry)
        return shares_of(relevance, 0).view(shape)
    # A decoder's square maps are those of its queries.
    square = {path: x for path, x, _ in found if x.shape[-1] == x.shape[-2] and 'decoder' not in path}
    # Several maps of one image are windows, and their places are unknown.
    if any(len(weights) > 1 for weights in square.values()):
        raise ConfigError('the attention lies in windows whose places on the map this model does not give.')
    first = next(iter(square), '')
    extra = class_tokens(model, {path: x.shape[-1] for path, x in square.items()}).get(first, 0)
    plain = map_shape(square[first].shape[-1] - extra, size) if square else None
    if plain is not None:
        relevance = torch.ones(square[first].shape[-1])
        if extra:
            relevance[1:] = 0
        for weights in reversed(square.values()):
            relevance = roll_back(relevance, weights[0]) if weights.shape == square[first].shape else relevance
        return shares_of(relevance[extra:], 0).view(plain)
    raise ConfigError(
        f'no self-attention over the image: {", ".join(path for path, *_ in found) or "none"} attend to other things.'
    )


def attended(model: nn.Module, recording: Recording) -> dict[str, Tensor]:
    """Return how much each head of each layer attends to each token of the image, ``(B, H, M)``, by the layer's path.

    It is the class token's row where the layer has one, else the mean row of all queries (of each window).

    Args:
        model: Model.
        recording: Recording of :func:`record_maps` with :func:`query_rows`.
    """
    rows = {path: maps for path, maps, _ in placed_maps(recording)}
    extra = class_tokens(model, {path: maps.shape[-1] for path, maps in rows.items()})
    return {path: maps[0, ..., extra[path] :] if path in extra else maps[1] for path, maps in rows.items()}


def head_maps(model: nn.Module, batch: dict[str, Any], layer: int = -1) -> tuple[str, np.ndarray, Any]:
    """Run a batch of one image; return a layer's path, its heads' attention as maps ``(H, h, w)``, and the result.

    Maps are those of the class token, else the mean over the queries. M-DGSA's are signed: below 0 they inhibit.
    ``layer`` counts the self-attentions over the image in the order in which they run.

    Raises:
        ConfigError: There is no such layer, or the places of its tokens are unknown.

    Source: PLuG, Fig. 8; M-DGSA, Fig. 3.
    """
    with record_maps(model, query_rows) as recording:
        sample = predict(model, batch)
    geometries = {path: geometry for path, _, geometry in placed_maps(recording) if 'decoder' not in path}
    path = chosen_layer(model, geometries, layer, 'attentions over an image')
    rows = attended(model, recording)[path]
    geometry = geometries[path]
    if geometry is None:
        shape = map_shape(rows.shape[-1], padded_size(sample))
        if shape is None or len(rows) > 1:
            raise ConfigError(f'{path} attends to {rows.shape[-1]} tokens whose places on the image are unknown.')
        return path, rows[0].unflatten(-1, shape).numpy(), sample
    in_windows = len(geometry) >= 4
    tokens = geometry[0] * geometry[1]
    queries = rows.shape[-1] if in_windows else tokens
    maps = rows.transpose(0, 1)[:, :, None].expand(-1, -1, queries, -1)  # (H, B nW, N, M), the same for all queries
    even = torch.full((tokens,), 1 / queries)
    back = [roll_back(even, x if in_windows else x[0], geometry, residual=0.0) for x in maps]
    return path, torch.stack(back).view(-1, *geometry[:2]).numpy(), sample


def agent_maps(model: nn.Module, batch: dict[str, Any], layer: int = 0) -> tuple[str, np.ndarray, Any]:
    """Run a batch of one image; return a layer's path, the maps of its n agent tokens ``(n, h, w)``, and the result.

    Maps are means over the heads.

    Raises:
        ConfigError: There is no such layer among the agent attentions.

    Source: Agent attention, Fig. 9.
    """
    with record(model, ['agents']) as recording:
        sample = predict(model, batch)
    path = chosen_layer(model, recording, layer, 'agent attentions')
    return path, recording[path]['agents'].last[0].mean(0).numpy(), sample


def agent_rows(path: str, maps: np.ndarray) -> Iterator[dict[str, Any]]:
    """Yield a row for a CSV file for each agent token: the place that it attends to most, and its weight there."""
    for agent, values in enumerate(maps):
        row, column = np.unravel_index(values.argmax(), values.shape)
        yield dict(layer=path, agent=agent, row=int(row), column=int(column), largest=float(values.max()))


def chosen_layer(model: nn.Module, paths: Any, layer: int, kind: str) -> str:
    """Return one of the paths, in the order in which they ran, by the number that ``--layer`` gives."""
    if not -len(paths) <= layer < len(paths):
        raise ConfigError(f'--layer {layer}: {type(model).__name__} has {len(paths)} {kind}.')
    return list(paths)[layer]
