"""What a decoder's queries depend on in the image: rollout through its self- and cross-attention."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmgate.analysis.probes.measures import roll_back
from mmgate.analysis.probes.recording import Recording, predicted
from mmgate.analysis.probes.relevance import factors
from mmgate.errors import ConfigError

_DECODER = re.compile(r'(^|\.)(transformer_)?decoder\.layers\.\d+\.(self|cross)_attn(\.|$)')
_ENCODER = re.compile(r'(^|\.)encoder\.layers\.')
Step = tuple[int | None, Tensor]


@dataclass(frozen=True)
class Query:
    """A query, what it predicts and what it depends on.

    Attributes:
        number: Of the query.
        label: Its best class; -1 without a head.
        score: Of that class.
        relevance: Of the padded input's places, ``(h, w)``; its sum is 1.
        place: Logits of a mask over the padded input, ``(h, w)``, more than 0 inside, or a box ``(x, y, w, h)``, 0 to 1
            over the image, of its centre and size; None without a head.
    """

    number: int
    label: int
    score: float
    relevance: np.ndarray
    place: np.ndarray | None


def query_rollout(steps: Sequence[Step], queries: Sequence[int]) -> dict[int, Tensor]:
    """Return how much of each token of the image reaches ``queries`` through a decoder, by memory ``(q, M)``.

    This is the rollout of one sequence that holds the learnt queries and all tokens of the image: cross-attention is a
    row of it whose keys are the image's, and what passes by it, a half, stays with the queries. So what an early layer
    brought in fades like everything else there. Chefer et al. (arXiv 2103.15679, Eq. 10) add ``R_qq A`` to the image's
    relevance without that, which gives every layer of a deep decoder one weight.

    Args:
        steps: Attentions in the order in which they ran: ``(None, (Q, Q))`` among the queries, ``(memory, (Q, M))`` to
            the tokens of the image, of which ``memory`` is a number, such as that of a level. Their rows sum to 1.
        queries: Their numbers.

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
    """Return the steps of a decoder whose queries attend to all tokens of an image; empty if there is none.

    Levels are told apart by their number of tokens, which is what stands for the memory.
    """
    steps: list[Step] = []
    for path, weights in _maps(layers, _DECODER):  # in the order in which they ran
        steps.append((None if '.self_attn' in path else weights.shape[-1], weights))
    return steps if any(memory is not None for memory, _ in steps) else []


def _maps(layers: Recording, pattern: re.Pattern[str]) -> list[tuple[str, Tensor]]:
    found = [(path, of['attention']) for path, of in layers.items() if 'attention' in of and pattern.search(path)]
    return [(path, maps.last[0]) for path, maps in found]


def query_relevance(layers: Recording, size: tuple[int, int], queries: Sequence[int]) -> list[Query]:
    """Return what ``queries`` of one image depend on.

    Levels are brought to the size of the finest and added. An encoder whose attention over the same tokens was
    recorded, DETR's, is rolled back through; deformable encoders and what lies below are not looked into.

    Args:
        layers: Of :func:`~mmgate.analysis.probes.relevance.record_maps`, of one image.
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
    by_shape = {}
    for tokens, relevance in query_rollout(steps, queries).items():
        for _, weights in reversed(_maps(layers, _ENCODER)):
            relevance = roll_back(relevance, weights) if weights.shape == (tokens, tokens) else relevance
        by_shape[_shape(layers, tokens, size)] = relevance
    relevances = add_levels(by_shape)
    relevances = relevances / relevances.sum((1, 2), keepdim=True).clamp(min=1e-12)  # what is left are learnt queries
    head = predicted(layers)
    found = []
    for number, relevance in zip(queries, relevances.numpy(), strict=True):
        if head is None:
            found.append(Query(number, -1, 0.0, relevance, None))
        else:
            score, label = head[0][0, number].max(-1)
            found.append(Query(number, int(label), float(score), relevance, head[1][0, number].numpy()))
    return found


def add_levels(by_shape: dict[tuple[int, int], Tensor]) -> Tensor:
    """Return relevances ``(Q, h w)`` of levels as their sum ``(Q, h, w)`` on the finest, every level's share kept."""
    finest = max(by_shape, key=lambda shape: shape[0] * shape[1])
    total: Any = 0
    for shape, relevance in by_shape.items():
        level = relevance.view(-1, 1, *shape)
        level = F.interpolate(level, size=finest, mode='bilinear')[:, 0] if shape != finest else level[:, 0]
        total = total + level * (relevance.sum(-1) / level.sum((1, 2)).clamp(min=1e-12))[:, None, None]
    return total


def _shape(layers: Recording, tokens: int, size: tuple[int, int]) -> tuple[int, int]:
    """Return height and width of a map of ``tokens``: of one that got positions, else by the image's aspect."""
    known = [x.tolist() for of in layers.values() if 'map_size' in of for x in of['map_size'].tensors]
    found = next(((h, w) for h, w in known if h * w == tokens), None) or factors(tokens, size)
    if found is None:
        raise ConfigError(f'{tokens} tokens make no map of the shape of a {size[0]} x {size[1]} image.')
    return found
