"""What a model attends to in an image: rollout through its layers, maps of a layer's heads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.analysis.probes.measures import roll_back, row_shares
from mmgate.analysis.probes.recording import PREDICTIONS, Recording, class_tokens, nearest, predict, record
from mmgate.analysis.probes.statistics import Kept
from mmgate.errors import ConfigError


def head_mean(weights: Tensor) -> Tensor:
    """Return the shares of attention weights ``(B, H, N, M)``, averaged over the heads, ``(B, N, M)``.

    Of signed weights (M-DGSA) the sizes count, head by head: signed, heads that disagree would cancel out.
    """
    return row_shares(weights.float()).mean(1)


def query_rows(weights: Tensor) -> Tensor:
    """Return the first and the mean row of attention weights ``(B, H, N, M)``, with their signs, ``(2, B, H, M)``."""
    return torch.stack([weights[:, :, 0], weights.mean(2)]).float()


def record_maps(model: nn.Module, reduce: Callable[[Tensor], Tensor] = head_mean) -> AbstractContextManager[Recording]:
    """Return a context that records attention, head means by default, where it lies, and what a head predicts."""
    names = ('attention', 'geometry', 'map_size', PREDICTIONS)
    return record(model, names, accumulate=lambda path, name: Kept(reduce) if name == 'attention' else Kept())


def relevance_map(recording: Recording, size: tuple[int, int]) -> Tensor:
    """Return the relevance of the places of one image ``(h, w)`` to the mean of the last layer's tokens; its sum is 1.

    With a class token it is the relevance to that token. Self-attention over the image alone counts: of the backbone,
    if it has any, else of the encoder. The aspect of ``size``, the padded image's, tells the map of plain attention.

    Raises:
        ConfigError: There is no self-attention over the image.
    """
    found = placed_maps(recording)
    placed = [(maps, geometry) for _, maps, geometry in found if geometry is not None]
    if placed:
        shape = placed[-1][1][:2]
        relevance = torch.ones(shape[0] * shape[1])
        for weights, geometry in reversed(placed):
            if shape != geometry[:2]:  # a merging of patches lies between
                before, shape = relevance.view(1, 1, *shape), geometry[:2]
                relevance = F.interpolate(before, size=shape, mode='bilinear').flatten()
            relevance = roll_back(relevance, weights if len(geometry) >= 4 else weights[0], geometry)
        return (relevance / relevance.sum()).view(shape)
    square = [x for path, x, _ in found if x.shape[-1] == x.shape[-2] and 'decoder' not in path]  # there: queries
    if any(len(weights) > 1 for weights in square):  # of one image: these are windows, nobody knows where
        raise ConfigError('the attention lies in windows of which this host does not tell where they are.')
    maps = [x[0] for x in square if x.shape == square[0].shape]
    for tokens in (0, 1, 2):  # a class token, DeiT's distillation token
        plain = factors(maps[0].shape[-1] - tokens, size) if maps else None
        if plain is not None:
            relevance = torch.ones(maps[0].shape[-1])
            if tokens:
                relevance[1:] = 0
            for weights in reversed(maps):
                relevance = roll_back(relevance, weights)
            return (relevance[tokens:] / relevance[tokens:].sum()).view(plain)
    raise ConfigError(
        f'no self-attention over the image: {", ".join(path for path, *_ in found) or "none"} attend to other things.'
    )


def attended(model: nn.Module, recording: Recording) -> dict[str, Tensor]:
    """Return, by layer, what its heads attend to among the regions of the image, ``(B, H, M)``, of :func:`query_rows`.

    It is the class token's row where the layer has one, else the mean of all queries' (of each window's).
    """
    rows = {path: maps for path, maps, _ in placed_maps(recording)}
    extra = class_tokens(model, {path: maps.shape[-1] for path, maps in rows.items()})
    return {path: maps[0, ..., extra[path] :] if path in extra else maps[1] for path, maps in rows.items()}


def head_maps(model: nn.Module, batch: dict[str, Any], layer: int = -1) -> tuple[str, np.ndarray, Any]:
    """Return a layer's path, what each of its heads attends to ``(H, h, w)``, and the data sample of the batch's image.

    Maps are those of the class token, else the mean of the queries'. M-DGSA's are signed: below 0 they inhibit.
    ``layer`` counts the self-attentions over the image as they run.

    Raises:
        ConfigError: There is no such layer, or nobody knows where its tokens lie.

    Source: PLuG, Fig. 8; M-DGSA, Fig. 3.
    """
    with record_maps(model, query_rows) as recording:
        sample = predict(model, batch)
    geometries = {path: geometry for path, _, geometry in placed_maps(recording) if 'decoder' not in path}
    if not -len(geometries) <= layer < len(geometries):
        raise ConfigError(f'--layer {layer}: {type(model).__name__} has {len(geometries)} attentions over an image.')
    path = list(geometries)[layer]
    rows, geometry = attended(model, recording)[path], geometries[path]
    if geometry is None:
        shape = factors(rows.shape[-1], padded_size(sample))
        if shape is None or len(rows) > 1:
            raise ConfigError(f'{path} attends to {rows.shape[-1]} tokens of which nobody knows where they are.')
        return path, rows[0].unflatten(-1, shape).numpy(), sample
    in_windows, tokens = len(geometry) >= 4, geometry[0] * geometry[1]
    queries = rows.shape[-1] if in_windows else tokens
    maps = rows.transpose(0, 1)[:, :, None].expand(-1, -1, queries, -1)  # (H, B nW, N, M): all queries alike
    even = torch.full((tokens,), 1 / queries)
    back = [roll_back(even, x if in_windows else x[0], geometry, residual=0.0) for x in maps]
    return path, torch.stack(back).view(-1, *geometry[:2]).numpy(), sample


def placed_maps(recording: Recording) -> list[tuple[str, Tensor, tuple[int, ...] | None]]:
    """Return the path of each attention, what was kept of it last, and where it lies, if a module around it says so."""
    found = []
    for path, readings in recording.items():
        if 'attention' in readings:
            geometry = nearest(recording, path, 'geometry')
            found.append((path, readings['attention'].last, geometry and tuple(geometry.last.tolist())))
    return found


def padded_size(sample: Any) -> tuple[int, int]:
    """Return height and width of what a model got of an image, padding included."""
    return tuple(sample.get('batch_input_shape') or sample.img_shape[:2])


def factors(tokens: int, size: tuple[int, int]) -> tuple[int, int] | None:
    """Return the height and width of ``tokens`` whose aspect is that of ``size``, or None."""
    aspect = size[0] / size[1]
    height = round((tokens * aspect) ** 0.5)
    for rows in sorted({height - 1, height, height + 1} - {-1, 0}, key=lambda h: abs(h - height)):
        if tokens and tokens % rows == 0 and abs(rows / (tokens // rows) / aspect - 1) < 0.25:
            return rows, tokens // rows
    return None
