"""Rollout of a model's attention over an image, CKA between its layers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.errors import ConfigError

from .maps import alignment, dependences, roll_back, rollout
from .recording import Recording, record
from .subjects import predict

MOST_ROWS = 1024  # of the maps that CKA compares: of more, as many are chosen evenly


class HeadMean:
    """Keeps attention weights ``(B, H, N, M)`` averaged over the heads."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        """Take one map."""
        self.tensors.append(x.float().mean(1).cpu())


def record_maps(model: nn.Module) -> Any:
    """Return a context that records head means of attention, and where windows and reductions lie."""
    return record(model, ('attention', 'geometry'), accumulate=dict(attention=HeadMean))


def relevance_map(recording: Recording, size: tuple[int, int]) -> Tensor:
    """Return the relevance of the input's places ``(h, w)`` to the mean of the last layer's tokens; its sum is 1.

    Args:
        recording: Of :func:`record_maps`, of one image.
        size: Height and width of the padded image, whose aspect tells the map of plain attention.

    With a class token it is the relevance to that token. Self-attention over the image alone counts: of the backbone,
    if it has any, else of the encoder.

    Raises:
        ConfigError: There is no self-attention over the image.
    """
    placed = [(maps, shape) for maps, shape in _placed(recording) if shape is not None]
    if placed:
        relevance = torch.full(_map(placed[-1][1]), 1.0)
        for weights, geometry in reversed(placed):
            if relevance.shape != _map(geometry):  # a merging of patches lies between
                relevance = F.interpolate(relevance[None, None], size=_map(geometry), mode='bilinear')[0, 0]
            relevance = relevance / relevance.sum()
            relevance = roll_back(relevance, weights if len(geometry) >= 4 else weights[0], geometry)
        return relevance / relevance.sum()
    over_image = {path: readings for path, readings in recording.items() if 'decoder' not in path}  # there: queries
    square = [weights for weights, _ in _placed(over_image) if weights.shape[-1] == weights.shape[-2]]
    if any(len(weights) > 1 for weights in square):  # of one image: these are windows, nobody knows where
        raise ConfigError('the attention lies in windows of which this host does not tell where they are.')
    maps = [weights[0] for weights in square]
    for tokens in (0, 1):
        plain = [x for x in maps if factors(x.shape[-1] - tokens, size) and x.shape == maps[0].shape]
        shape = factors(plain[0].shape[-1] - tokens, size) if plain else None
        if shape is not None:
            whole = rollout(plain)
            flow = whole[0, 1:] if tokens else whole.mean(0)
            return (flow / flow.sum()).view(shape)
    attend = [path for path, readings in recording.items() if 'attention' in readings]
    raise ConfigError(f'no self-attention over the image: {", ".join(attend) or "none"} attend to other things.')


def attention_cka(model: nn.Module, batches: Iterable[dict[str, Any]]) -> tuple[list[str], np.ndarray]:
    """Return the layers with attention weights, in the order in which they run, and their CKA ``(layers, layers)``.

    The rows of a map, averaged over heads (and windows), are what is compared: what a query attends to. Of two layers
    with another number of queries, those of the larger one count that lie where the smaller one's do. The dependences
    are summed up over images before their ratio is taken; NaN where a map has fewer than four queries.
    """
    total: np.ndarray = np.zeros((0, 0, 3))
    paths: list[str] = []
    for batch in batches:
        with record_maps(model) as recording:
            predict(model, batch)
        paths = [path for path, readings in recording.items() if 'attention' in readings]
        maps = [
            (weights.mean(0), None if geometry is None or len(geometry) >= 4 else _map(geometry))
            for weights, geometry in _placed(recording)
        ]
        found = np.zeros((len(maps), len(maps), 3))
        for (i, one), (j, other) in combinations_with_replacement(enumerate(maps), 2):
            mutual, own, own_of_other = _dependences(one, other)
            found[i, j], found[j, i] = (mutual, own, own_of_other), (mutual, own_of_other, own)
        total = found + total if total.size else found
    return paths, alignment(total)


def _dependences(one: tuple[Tensor, Any], other: tuple[Tensor, Any]) -> tuple[float, float, float]:
    """Return the dependence of two maps on each other, and of each on itself, over queries that lie at one place."""
    (x, size), (y, size_of_y) = one, other
    if len(x) > len(y):
        mutual, own, own_of_y = _dependences(other, one)
        return mutual, own_of_y, own
    y = y[_same_places(len(x), size, len(y), size_of_y)]
    chosen = torch.linspace(0, len(x) - 1, min(len(x), MOST_ROWS)).round().long()
    return dependences(x[chosen], y[chosen])


def _same_places(rows: int, size: Any, rows_of_larger: int, larger: Any) -> Tensor:
    """Return, for each token of a smaller map, that of a larger one which lies there: on the image if both do."""

    def along(count: int, count_of_larger: int) -> Tensor:
        return ((torch.arange(count) + 0.5) * count_of_larger / count).long()

    if rows == rows_of_larger or size is None or larger is None:
        return along(rows, rows_of_larger)
    return (along(size[0], larger[0])[:, None] * larger[1] + along(size[1], larger[1])).flatten()


def _placed(recording: Recording) -> list[tuple[Tensor, tuple[int, ...] | None]]:
    found = []
    for path, readings in recording.items():
        if 'attention' not in readings:
            continue
        outer = next((p for p in (path, path.rpartition('.')[0]) if 'geometry' in recording.get(p, {})), None)
        geometry = tuple(recording[outer]['geometry'].tensors[-1].tolist()) if outer else None
        found.append((readings['attention'].tensors[-1], geometry))
    return found


def _map(geometry: Any) -> tuple[int, int]:
    return int(geometry[0]), int(geometry[1])


def factors(tokens: int, size: tuple[int, int]) -> tuple[int, int] | None:
    """Return the height and width of ``tokens`` whose aspect is that of ``size``, or None."""
    aspect = size[0] / size[1]
    height = round((tokens * aspect) ** 0.5)
    for rows in sorted({height - 1, height, height + 1} - {-1, 0}, key=lambda h: abs(h - height)):
        if tokens and tokens % rows == 0 and abs(rows / (tokens // rows) / aspect - 1) < 0.25:
            return rows, tokens // rows
    return None
