"""Similarity of layers' attention patterns: centred kernel alignment (CKA), over images or over queries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmgate.analysis.probes.recording import predict
from mmgate.analysis.probes.relevance import attended, placed_maps, query_rows, record_maps
from mmgate.errors import ConfigError

MOST_ROWS = 1024  # of the matrices that are compared at once: images, or queries chosen evenly
LEAST_ROWS = 4  # that the unbiased dependence needs


def attention_cka(model: nn.Module, batches: Iterable[dict[str, Any]]) -> tuple[list[str], np.ndarray]:
    """Return the layers with attention weights and the CKA of their patterns over images, ``(layers, layers)``.

    A sample is an image. Its features are what the class token attends to among the regions, in a layer without one
    what the mean query attends to; heads, of which the paper does not speak, stand side by side. Unbiased dependences
    of blocks of 1024 images are summed up before their ratio is taken, so that a data set of any size fits; up to
    three images that are left over do not count.

    Raises:
        ConfigError: There are fewer than four images, or images of different sizes.

    Source: PLuG, section 4.3 and Fig. 6.
    """
    total: Any = 0.0
    block: list[list[Tensor]] = []
    paths: list[str] = []
    for batch in batches:
        with record_maps(model, query_rows) as recording:
            predict(model, batch)
        features = attended(model, recording)
        paths = list(features)
        block.append([x.flatten() for x in features.values()])
        if len(block) == MOST_ROWS:
            total, block = total + _block(block), []
    if len(block) >= LEAST_ROWS:
        total = total + _block(block)
    if np.ndim(total) == 0:
        raise ConfigError(f'CKA over images needs {LEAST_ROWS} images or more, got {len(block)}.')
    own = np.diagonal(total)
    return paths, alignment(np.stack(np.broadcast_arrays(total, own[:, None], own), -1))


def _block(images: Sequence[Sequence[Tensor]]) -> np.ndarray:
    """Return the dependences of layers ``(L, L)`` over images, times their number."""
    layers = list(zip(*images, strict=True))
    if any(x.shape != layer[0].shape for layer in layers for x in layer):
        raise ConfigError(
            'CKA over images needs images of one size, whose regions are the same; that over queries does not.'
        )
    kernels = [products(torch.stack(layer)) for layer in layers]
    return len(images) * np.array([[dependence_of(one, other) for other in kernels] for one in kernels])


def query_cka(model: nn.Module, batches: Iterable[dict[str, Any]]) -> tuple[list[str], np.ndarray]:
    """Return the layers with attention weights and their CKA over queries, ``(layers, layers)``: ours, not PLuG's.

    The rows of a map, averaged over heads (and windows), are the samples: what a query attends to. Of two layers
    with another number of queries, those of the larger one count that lie where the smaller one's do. The dependences
    are summed up over images before their ratio is taken; NaN where a map has fewer than four queries.
    """
    total: Any = 0.0
    paths: list[str] = []
    for batch in batches:
        with record_maps(model) as recording:
            predict(model, batch)
        placed = placed_maps(recording)
        paths = [path for path, _, _ in placed]
        maps = [
            (weights.mean(0), None if geometry is None or len(geometry) >= 4 else geometry[:2])
            for _, weights, geometry in placed
        ]
        found = np.zeros((len(maps), len(maps), 3))
        for (i, one), (j, other) in combinations_with_replacement(enumerate(maps), 2):
            mutual, own, own_of_other = _dependences(one, other)
            found[i, j], found[j, i] = (mutual, own, own_of_other), (mutual, own_of_other, own)
        total = total + found
    return paths, alignment(total)


def _dependences(one: tuple[Tensor, Any], other: tuple[Tensor, Any]) -> tuple[float, float, float]:
    """Return the dependence of two maps on each other, and of each on itself, over queries that lie at one place."""
    (x, size), (y, size_of_y) = one, other
    if len(x) > len(y):
        x = x[_same_places(len(y), size_of_y, len(x), size)]
    else:
        y = y[_same_places(len(x), size, len(y), size_of_y)]
    chosen = torch.linspace(0, len(x) - 1, min(len(x), MOST_ROWS)).round().long()
    kernel, kernel_of_y = products(x[chosen]), products(y[chosen])
    return dependence_of(kernel, kernel_of_y), dependence_of(kernel, kernel), dependence_of(kernel_of_y, kernel_of_y)


def _same_places(rows: int, size: Any, rows_of_larger: int, larger: Any) -> Tensor:
    """Return, for each token of a smaller map, that of a larger one which lies there: on the image if both do."""

    def along(count: int, count_of_larger: int) -> Tensor:
        return ((torch.arange(count) + 0.5) * count_of_larger / count).long()

    if rows == rows_of_larger or size is None or larger is None:
        return along(rows, rows_of_larger)
    return (along(size[0], larger[0])[:, None] * larger[1] + along(size[1], larger[1])).flatten()


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
