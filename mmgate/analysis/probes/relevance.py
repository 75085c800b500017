"""Compute which places of an image matter to a model's output, by attention rollout, or to one layer's heads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.analysis.probes.measures import roll_back, row_shares
from mmgate.analysis.probes.recording import (
    PREDICTIONS,
    Recording,
    Sample,
    class_tokens,
    nearest,
    predict,
    predicted,
    record,
)
from mmgate.errors import ConfigError
from mmgate.notes import Kept

_DECODER = re.compile(r'(^|\.)(transformer_)?decoder\.layers\.\d+\.(self|cross)_attn(\.|$)')
_ENCODER = re.compile(r'(^|\.)encoder\.layers\.')
Step = tuple[int | None, Tensor]  # the memory that a decoder attends to (None: its queries), and the weights


def head_mean(weights: Tensor, *, absolute: bool = False) -> Tensor:
    """Normalise the rows of attention weights ``(B, H, N, M)`` and average them over the heads, ``(B, N, M)``.

    Shares of signed weights (M-DGSA) keep their signs, as in the paper's Fig. 3: inhibition is below 0, and heads that
    disagree cancel out. With ``absolute`` the absolute values are averaged.
    """
    return row_shares(weights.float(), signed=not absolute).mean(1)


def query_rows(weights: Tensor) -> Tensor:
    """Return the first row (a class token's) and the mean row of weights ``(B, H, N, M)``, stacked ``(2, B, H, M)``."""
    return torch.stack([weights[:, :, 0], weights.mean(2)]).float()


def record_maps(model: nn.Module, reduce: Callable[[Tensor], Tensor] = head_mean) -> AbstractContextManager[Recording]:
    """Return a context that records attention maps (by default means over heads), their layout, and predictions."""
    names = ('attention', 'geometry', 'map_size', PREDICTIONS)
    return record(model, names, accumulate=lambda first: Kept(reduce) if first.name == 'attention' else Kept())


def relevance_map(recording: Recording, size: tuple[int, int]) -> Tensor:
    """Return by attention rollout how much each place of an image contributes to the last layer's tokens, ``(h, w)``.

    Absolute values sum to 1; inhibition, in M-DGSA's signed maps, is below 0. With a class token it is the relevance to
    that token. Only self-attention over the image counts: the backbone's, if it has any, else the encoder's. Height
    and width of plain attention's map follow from the aspect of ``size``, that of the padded image.

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
    square = [x for path, x, _ in found if x.shape[-1] == x.shape[-2] and 'decoder' not in path]
    # Several maps of one image are windows, and their places are unknown.
    if any(len(weights) > 1 for weights in square):
        raise ConfigError('the attention lies in windows whose places on the map this model does not give.')
    maps = [x[0] for x in square if x.shape == square[0].shape]
    for tokens in (0, 1, 2):  # none, a class token, DeiT's distillation token
        plain = factors(maps[0].shape[-1] - tokens, size) if maps else None
        if plain is not None:
            relevance = torch.ones(maps[0].shape[-1])
            if tokens:
                relevance[1:] = 0
            for weights in reversed(maps):
                relevance = roll_back(relevance, weights)
            return shares_of(relevance[tokens:], 0).view(plain)
    raise ConfigError(
        f'no self-attention over the image: {", ".join(path for path, *_ in found) or "none"} attend to other things.'
    )


def shares_of(relevance: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """Normalise relevances so that their absolute values sum to 1 over the axes ``dims``; all zeros stay zeros."""
    return relevance / relevance.abs().sum(dims, keepdim=True).clamp(min=1e-12)


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


def head_maps(model: nn.Module, batch: dict[str, Any], layer: int = -1) -> tuple[str, np.ndarray, Sample]:
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
    if not -len(geometries) <= layer < len(geometries):
        raise ConfigError(f'--layer {layer}: {type(model).__name__} has {len(geometries)} attentions over an image.')
    path = list(geometries)[layer]
    rows = attended(model, recording)[path]
    geometry = geometries[path]
    if geometry is None:
        shape = factors(rows.shape[-1], padded_size(sample))
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


def agent_maps(model: nn.Module, batch: dict[str, Any], layer: int = 0) -> tuple[str, np.ndarray, Sample]:
    """Run a batch of one image; return a layer's path, the maps of its n agent tokens ``(n, h, w)``, and the result.

    Maps are means over the heads.

    Raises:
        ConfigError: There is no such layer among the agent attentions.

    Source: Agent attention, Fig. 9.
    """
    with record(model, ['agents']) as recording:
        sample = predict(model, batch)
    paths = list(recording)
    if not -len(paths) <= layer < len(paths):
        raise ConfigError(f'--layer {layer}: {type(model).__name__} has {len(paths)} agent attentions.')
    return paths[layer], recording[paths[layer]]['agents'].last[0].mean(0).numpy(), sample


def agent_rows(path: str, maps: np.ndarray) -> Iterator[dict[str, Any]]:
    """Yield a row for a CSV file for each agent token: the place that it attends to most, and its weight there."""
    for agent, values in enumerate(maps):
        row, column = np.unravel_index(values.argmax(), values.shape)
        yield dict(layer=path, agent=agent, row=int(row), column=int(column), largest=float(values.max()))


def placed_maps(recording: Recording) -> list[tuple[str, Tensor, tuple[int, ...] | None]]:
    """Return for each recorded attention its path, its last map, and the layout of its tokens on the image, or None."""
    found = []
    for path, notes in recording.items():
        if 'attention' in notes:
            geometry = nearest(recording, path, 'geometry')
            found.append((path, notes['attention'].last, geometry and tuple(geometry.last.tolist())))
    return found


def padded_size(sample: Sample) -> tuple[int, int]:
    """Return height and width of the padded input in which the model got an image."""
    return tuple(sample.get('batch_input_shape') or sample.img_shape[:2])


def factors(tokens: int, size: tuple[int, int]) -> tuple[int, int] | None:
    """Return height and width of a map of so many tokens with the aspect ratio of ``size``, or None if none fits."""
    aspect = size[0] / size[1]
    height = round((tokens * aspect) ** 0.5)
    for rows in sorted({height - 1, height, height + 1} - {-1, 0}, key=lambda h: abs(h - height)):
        if tokens and tokens % rows == 0 and abs(rows / (tokens // rows) / aspect - 1) < 0.25:
            return rows, tokens // rows
    return None


@dataclass(frozen=True)
class Query:
    """A decoder's query: the places of the image that it depends on and, if there is a head, its prediction.

    ``relevance`` ``(h, w)`` covers the padded input; its absolute values sum to 1. ``place`` holds the logits of a mask
    over the padded input, ``(h, w)``, above 0 inside, or a box ``(x, y, w, h)`` of centre and size, 0 to 1 over the
    image.
    """

    number: int
    relevance: np.ndarray
    label: int = -1
    score: float = 0.0
    place: np.ndarray | None = None


def query_rollout(steps: Sequence[Step], queries: Sequence[int]) -> dict[int, Tensor]:
    """Take the relevance of each query back through a decoder; return that of the image's tokens ``(q, M)``.

    It is a dict by the memory, such as a level, that the tokens belong to.

    This is the rollout of one sequence that holds the learnt queries and all tokens of the image: cross-attention is a
    row of it whose keys are the image's, and the residual half stays with the queries. The relevance from an early
    layer is therefore halved by every later one. Chefer et al. (arXiv 2103.15679, Eq. 10) add ``R_qq A`` to the image's
    relevance without halving, which gives every layer of a deep decoder the same weight.

    Args:
        steps: Attentions in the order in which they ran: ``(None, (Q, Q))`` among the queries, ``(memory, (Q, M))`` to
            the tokens of the image; ``memory`` is any number that tells levels apart. Rows sum to 1.
        queries: Indices of the queries.

    Source: Abnar and Zuidema, Quantifying attention flow in transformers (arXiv 2005.00928), Eq. 1.
    """
    relevance = torch.eye(steps[0][1].shape[0], dtype=steps[0][1].dtype)[list(queries)]
    image: dict[int, Tensor] = {}
    for memory, weights in reversed(steps):
        if memory is None:
            relevance = roll_back(relevance, weights)
        else:
            image[memory] = image.get(memory, 0) + 0.5 * relevance @ weights
            relevance = 0.5 * relevance
    return image


def decoder_steps(layers: Recording) -> list[Step]:
    """Return the attentions of a decoder, in their order, as steps for :func:`query_rollout`.

    It is empty unless the decoder's queries attend to all tokens of an image.

    The memory of a step is its number of tokens, which tells levels apart.
    """
    maps = _maps(layers, _DECODER)  # in the order in which they ran
    steps: list[Step] = [(None if '.self_attn' in path else x.shape[-1], x) for path, x in maps]
    return steps if any(memory is not None for memory, _ in steps) else []


def _maps(layers: Recording, pattern: re.Pattern[str]) -> list[tuple[str, Tensor]]:
    return [(path, maps[0]) for path, maps, _ in placed_maps(layers) if pattern.search(path)]


def query_relevance(layers: Recording, size: tuple[int, int], queries: Sequence[int]) -> list[Query]:
    """Return each query's predicted box and class, and a map of how relevant each place of the image was to it.

    Levels are resized to the finest and added. Relevance is rolled back through a dense encoder such as DETR's, but not
    through a deformable encoder or the backbone.

    Args:
        layers: Recording of :func:`record_maps` of one image.
        size: Height and width of the padded input.
        queries: Indices of the queries.

    Raises:
        ConfigError: No decoder attends densely, there is no such query, or height and width of a level are unknown.
    """
    steps = decoder_steps(layers)
    if not steps:
        raise ConfigError(f'no decoder attends densely to the image: {", ".join(layers) or "nothing"} was recorded.')
    count = steps[0][1].shape[0]
    if any(not 0 <= query < count for query in queries):
        raise ConfigError(f'the queries {", ".join(map(str, queries))} have to lie in 0 to {count - 1}.')
    by_shape = {}
    for tokens, relevance in query_rollout(steps, queries).items():
        for _, weights in reversed(_maps(layers, _ENCODER)):
            relevance = roll_back(relevance, weights) if weights.shape == (tokens, tokens) else relevance
        by_shape[_shape(layers, tokens, size)] = relevance
    relevances = add_levels(by_shape)
    # The rest of the relevance is that of the learnt queries.
    relevances = shares_of(relevances, (1, 2))
    head = predicted(layers)
    found = []
    for number, relevance in zip(queries, relevances.numpy(), strict=True):
        query = Query(number, relevance)
        if head is not None:
            score, label = head[0][0, number].max(-1)
            query = Query(number, relevance, int(label), float(score), head[1][0, number].numpy())
        found.append(query)
    return found


def add_levels(by_shape: dict[tuple[int, int], Tensor]) -> Tensor:
    """Resize the relevances of several levels ``(Q, h w)`` to the finest one and add them, ``(Q, h, w)``.

    Each level keeps its share of the sum.
    """
    finest = max(by_shape, key=lambda shape: shape[0] * shape[1])
    total = torch.zeros(())
    for shape, relevance in by_shape.items():
        level = relevance.view(-1, 1, *shape)
        level = F.interpolate(level, size=finest, mode='bilinear')[:, 0] if shape != finest else level[:, 0]
        total = total + shares_of(level, (1, 2)) * relevance.abs().sum(-1)[:, None, None]
    return total


def _shape(layers: Recording, tokens: int, size: tuple[int, int]) -> tuple[int, int]:
    """Return height and width of a map of so many tokens, as recorded or, if not recorded, by the image's aspect."""
    known = [x.tolist() for of in layers.values() if 'map_size' in of for x in of['map_size'].tensors]
    found = next(((h, w) for h, w in known if h * w == tokens), None) or factors(tokens, size)
    if found is None:
        raise ConfigError(f'{tokens} tokens make no map of the shape of a {size[0]} x {size[1]} image.')
    return found
