"""What a decoder's queries depend on in the image: rollout through its self- and cross-attention."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.analysis.probes.measures import rollout, row_shares
from mmgate.analysis.probes.recording import Recording, predicted, record_queries
from mmgate.analysis.probes.relevance import factors, head_mean, reduce_attention
from mmgate.errors import ConfigError

_DECODER = re.compile(r'(^|\.)(transformer_)?decoder\.layers\.\d+\.(self|cross)_attn(\.|$)')
Step = tuple[int | None, Tensor]


@dataclass(frozen=True)
class Query:
    """A query, what it predicts and what it depends on.

    Attributes:
        number: Of the query.
        label: Its best class; -1 without a head.
        score: Of that class.
        relevance: Of the padded input's places, ``(h, w)``; its sum is 1.
        mask: Logits over the padded input, ``(h, w)``, more than 0 inside; or None.
        box: ``(x, y, x, y)``, 0 to 1 over the image, or None.
    """

    number: int
    label: int
    score: float
    relevance: np.ndarray
    mask: np.ndarray | None
    box: np.ndarray | None


def query_rollout(steps: Sequence[Step], residual: float = 0.5) -> tuple[Tensor, dict[int, Tensor]]:
    """Roll queries' attention back through a decoder.

    This is the rollout of one sequence that holds the learnt queries and all tokens of the image: cross-attention is a
    row of it whose keys are the image's, and what passes by it stays with the queries. So shares sum to 1, and what an
    early layer brought in fades like everything else there. Chefer et al. (arXiv 2103.15679, Eq. 10) add
    ``R_qq A`` to the image's relevance without that, which gives every layer of a deep decoder one weight.

    Args:
        steps: Attentions in the order in which they ran: ``(None, (Q, Q))`` among the queries, ``(memory, (Q, M))`` to
            the tokens of the image, of which ``memory`` is a number, such as that of a level.
        residual: Share of a layer's input that passes by the attention.

    Returns:
        How much of each learnt query reaches each query, ``(Q, Q)``, and by memory how much of each token, ``(Q, M)``.

    Source: Abnar and Zuidema, Quantifying attention flow in transformers (arXiv 2005.00928), Eq. 1.
    """
    own = torch.eye(steps[0][1].shape[0], dtype=steps[0][1].dtype)
    image: dict[int, Tensor] = {}
    for memory, weights in steps:
        shares = (1 - residual) * row_shares(weights)
        if memory is None:
            own = residual * own + shares @ own
            image = {key: residual * found + shares @ found for key, found in image.items()}
            continue
        own, image = residual * own, {key: residual * found for key, found in image.items()}
        image[memory] = image.get(memory, 0) + shares
    return own, image


def record_decoder(model: nn.Module) -> AbstractContextManager[Recording]:
    """Record attention, averaged over heads, where it lies, and what the head says of each query."""
    return record_queries(model, ('attention', 'geometry', 'map_size'), accumulate=reduce_attention(head_mean))


def decoder_steps(layers: Recording) -> list[Step]:
    """Return the steps of a decoder whose queries attend to all tokens of an image; empty if there is none.

    Levels are told apart by their number of tokens, which is what stands for the memory.
    """
    steps: list[Step] = []
    for path, readings in layers.items():  # in the order in which they ran
        place = _DECODER.search(path)
        if place and 'attention' in readings:
            weights = readings['attention'].last[0]
            steps.append((None if place[3] == 'self' else weights.shape[-1], weights))
    return steps if any(memory is not None for memory, _ in steps) else []


def query_relevance(layers: Recording, size: tuple[int, int], queries: Sequence[int]) -> list[Query]:
    """Return what ``queries`` of one image depend on.

    Levels are brought to the size of the finest and added. An encoder whose attention over the same tokens was
    recorded, DETR's, is rolled back through; deformable encoders and what lies below are not looked into.

    Args:
        layers: Of :func:`record_decoder`, of one image.
        size: Height and width of the padded input.
        queries: Their numbers.

    Raises:
        ConfigError: There is no decoder of the kind, no such query, or a level's height and width are not known.
    """
    steps = decoder_steps(layers)
    if not steps:
        raise ConfigError(f'no decoder attends densely to the image: {", ".join(layers) or "nothing"} was recorded.')
    count = steps[0][1].shape[0]
    if any(not 0 <= query < count for query in queries):
        raise ConfigError(f'the queries {", ".join(map(str, queries))} have to lie in 0 to {count - 1}.')
    chosen = list(queries)
    by_shape = {}
    for tokens, relevance in query_rollout(steps)[1].items():
        encoder = _encoder_maps(layers, tokens)
        by_shape[_shape(layers, tokens, size)] = relevance[chosen] @ rollout(encoder) if encoder else relevance[chosen]
    maps = add_levels(by_shape)
    maps = maps / maps.sum((1, 2), keepdim=True).clamp(min=1e-12)  # what is left are learnt queries
    scores, places = predicted(layers) or (None, None)
    result = []
    for row, number in enumerate(chosen):
        score, label = (0.0, -1) if scores is None else (float(t) for t in scores[0, number].max(-1))
        place = None if places is None else places[0, number]
        mask = place.numpy() if place is not None and place.dim() == 2 else None
        box = _corners(place) if place is not None and place.dim() == 1 else None
        result.append(Query(number, int(label), score, maps[row].numpy(), mask, box))
    return result


def add_levels(by_shape: dict[tuple[int, int], Tensor]) -> Tensor:
    """Return relevances ``(Q, h w)`` of levels as their sum ``(Q, h, w)`` on the finest, every level's share kept."""
    finest = max(by_shape, key=lambda shape: shape[0] * shape[1])
    total: Any = 0
    for shape, relevance in by_shape.items():
        level = relevance.view(-1, 1, *shape)
        level = F.interpolate(level, size=finest, mode='bilinear')[:, 0] if shape != finest else level[:, 0]
        total = total + level * (relevance.sum(-1) / level.sum((1, 2)).clamp(min=1e-12))[:, None, None]
    return total


def _encoder_maps(layers: Recording, tokens: int) -> list[Tensor]:
    maps = [
        readings['attention'].last[0]
        for path, readings in layers.items()
        if 'attention' in readings and re.search(r'(^|\.)encoder\.layers\.', path)
    ]
    return [x for x in maps if x.shape == (tokens, tokens)]


def _shape(layers: Recording, tokens: int, size: tuple[int, int]) -> tuple[int, int]:
    """Return height and width of a map of ``tokens``: of one that got positions, else by the image's aspect."""
    known = [x.tolist() for of in layers.values() if 'map_size' in of for x in of['map_size'].tensors]
    found = next(((h, w) for h, w in known if h * w == tokens), None) or factors(tokens, size)
    if found is None:
        raise ConfigError(f'{tokens} tokens make no map of the shape of a {size[0]} x {size[1]} image.')
    return found


def _corners(box: Tensor) -> np.ndarray:
    x, y, width, height = box.double().tolist()
    return np.array([x - width / 2, y - height / 2, x + width / 2, y + height / 2])
