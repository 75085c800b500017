"""Record the sampling points of deformable attention, and place them on the image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from mmgate.analysis.probes.recording import PREDICTIONS, Recording, Sample, best_queries, predicted, record
from mmgate.analysis.probes.relevance import padded_size
from mmgate.errors import ConfigError
from mmgate.notes import POINTS
from mmgate.ops.deformable.uneven import pad_points


@dataclass(frozen=True)
class SamplingPoints:
    """The sampling points of some queries in one layer: their places on the image, their weights and levels.

    Places are pixels of the image on disk. ``reference`` ``(q, 2)`` holds the queries' reference points, or the centres
    of their boxes; level 0 is the finest; an encoder's queries are the pixels of its levels. If levels have different
    numbers of points, ``num_points`` has that of each level, P is the largest, and :attr:`there` says which ones exist.
    ``boxes`` ``(q, 4)`` are those that a head predicts for the queries of a decoder, as (x, y, x, y); None without one.
    """

    path: str
    xy: np.ndarray
    weights: np.ndarray
    reference: np.ndarray
    queries: np.ndarray
    levels: list[int]
    is_encoder: bool
    num_points: tuple[int, ...] | None = None
    boxes: np.ndarray | None = None

    @property
    def there(self) -> np.ndarray:
        """Mask ``(L, P)`` of the points that exist, where levels have different numbers of points."""
        levels, points = self.weights.shape[2:]
        counts = np.full(levels, points) if self.num_points is None else np.array(self.num_points)
        return np.arange(points) < counts[:, None]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for a CSV file for each sampling point."""
        there = self.there
        for place in np.ndindex(*self.weights.shape):
            query, head, level, point = place
            if not there[level, point]:
                continue
            numbers = dict(query=int(self.queries[query]), head=head, level=self.levels[level], point=point)
            x, y, weight = (float(value) for value in (*self.xy[place], self.weights[place]))
            yield dict(layer=self.path, **numbers, x=x, y=y, weight=weight)


@dataclass(frozen=True)
class SamplingChange:
    """Sampling points of the same queries in two models: ``before`` in the vanilla one, ``after`` in the gated one."""

    before: SamplingPoints
    after: SamplingPoints

    @property
    def weights(self) -> np.ndarray:
        """The weight that each point gained by the gates, ``(q, H, L, P)``, negative where it lost some."""
        return self.after.weights - self.before.weights

    @property
    def moved(self) -> float:
        """The share of attention, 0 to 1, that the gates moved from some points to others, averaged over queries.

        It is half of the sum of all changes' sizes, over the sum of weights: what some points gained, others lost.
        """
        total = (np.abs(self.before.weights).sum() + np.abs(self.after.weights).sum()) / 2
        return float(np.abs(self.weights).sum() / 2 / max(total, 1e-12))

    @property
    def apart(self) -> float:
        """The largest distance, in pixels, between a query's reference points in the two models."""
        return float(np.linalg.norm(self.after.reference - self.before.reference, axis=-1).max())

    @property
    def shifted(self) -> float:
        """The distance in pixels by which the gates move a point on average, weighted by attention."""
        there = self.after.there
        distances = np.linalg.norm(self.after.xy - self.before.xy, axis=-1)[:, :, there]
        weights = np.abs(self.before.weights)[:, :, there] + 1e-12
        return float((distances * weights).sum() / weights.sum())

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for a CSV file for each sampling point."""
        for before, after in zip(self.before.rows(), self.after.rows(), strict=True):
            earlier = {f'{name}_before': before[name] for name in ('x', 'y', 'weight')}
            yield dict(after, **earlier, change=after['weight'] - before['weight'])


@dataclass(frozen=True)
class ImageSample:
    """Path and sizes of an image, given by hand where there is no data sample of mmdet, as for transformers' models.

    Shapes are (height, width): of the image on disk, of the model's input without padding, and with it.
    """

    img_path: str
    ori_shape: tuple[int, int]
    img_shape: tuple[int, int]
    batch_input_shape: tuple[int, int]

    def get(self, name: str) -> Any:
        """Return the attribute of this name as a data sample does, with ``scale_factor`` as (x, y); None if unknown."""
        if name == 'scale_factor':
            return self.img_shape[1] / self.ori_shape[1], self.img_shape[0] / self.ori_shape[0]
        return getattr(self, name, None)


def record_sampling(model: nn.Module) -> AbstractContextManager[Recording]:
    """Return a context that records the sampling points of each deformable attention, and a head's predictions."""
    return record(model, (*POINTS, 'gate', PREDICTIONS))


def layers_of(layers: Recording, part: str) -> list[str]:
    """Return the paths of the recorded deformable attentions in ``part``, ``'encoder'`` or ``'decoder'``.

    An encoder's has one query for each pixel of the maps.
    """
    found = []
    for path, notes in layers.items():
        if 'locations' in notes:
            pixels = int(notes['spatial_shapes'].last.prod(-1).sum())
            if (notes['locations'].last.shape[1] == pixels) == (part == 'encoder'):
                found.append(path)
    return found


def to_image(xy: np.ndarray, sample: Sample) -> np.ndarray:
    """Convert places (x, y) from shares of the padded input, 0 to 1, to pixels of the image on disk."""
    height, width = padded_size(sample)
    scale = np.asarray(sample.get('scale_factor') or (1.0, 1.0), np.float64)[:2]
    return xy * np.array([width, height]) / scale


def query_at(
    layers: Recording, path: str, sample: Sample, pixel: tuple[float, float] | None = None, level: int = 0
) -> int:
    """Return the number of an encoder's query that lies at a pixel ``(x, y)`` of the image on disk.

    The default is the middle of the image.

    Raises:
        ConfigError: The pixel lies outside of the image.
    """
    height, width = sample.ori_shape[:2]
    x, y = pixel or (width / 2, height / 2)
    if not (0 <= x < width and 0 <= y < height):
        raise ConfigError(f'the pixel ({x:g}, {y:g}) lies outside of the image of {width} x {height}.')
    sizes = layers[path]['spatial_shapes'].last.tolist()
    rows, columns = sizes[level]
    x, y = np.array([x, y]) / to_image(np.ones(2), sample)  # 0 to 1 over the padded batch
    return sum(h * w for h, w in sizes[:level]) + int(y * rows) * columns + int(x * columns)


def chosen_points(
    layers: Recording,
    sample: Sample,
    image: int = 0,
    *,
    part: str | None = None,
    layer: int = -1,
    top_k: int = 3,
    queries: Sequence[int] | None = None,
    pixel: tuple[float, float] | None = None,
    level: int | None = None,
) -> SamplingPoints:
    """Return the sampling points to draw: of a decoder's best queries, or of the encoder's query at a pixel.

    Args:
        layers: Recording of :func:`record_sampling`, of one forward pass.
        sample: The image's data sample, with ``img_shape``, ``scale_factor`` and, in a padded batch,
            ``batch_input_shape``.
        image: The image's place in the batch.
        part: ``'decoder'`` or ``'encoder'``; by default the decoder, if there is one and no pixel is given.
        layer: Index of the layer in that part.
        top_k: Number of queries of a decoder.
        queries: Indices of queries instead of the best.
        pixel: ``(x, y)`` on the image on disk (default: its middle).
        level: For a decoder the only level whose points are returned, for an encoder the level of the query.

    Raises:
        ConfigError: There is no such part, layer, query, level or pixel.
    """
    part = part or ('encoder' if pixel or not layers_of(layers, 'decoder') else 'decoder')
    paths = layers_of(layers, part)
    if not paths:
        raise ConfigError(f'--part {part}: the model has deformable attention in its other part only.')
    if not -len(paths) <= layer < len(paths):
        raise ConfigError(f'--layer {layer}: the {part} has {len(paths)} layers.')
    path = paths[layer]
    is_encoder = part == 'encoder'
    if pixel and not is_encoder:
        raise ConfigError('--pixel chooses a query of the encoder; give --part encoder.')
    notes = {name: found.last for name, found in layers[path].items()}
    count = notes['locations'].shape[1]
    level_count = len(notes['spatial_shapes'])
    if level is not None and not 0 <= level < level_count:
        raise ConfigError(f'level {level} does not exist; the model has levels 0 to {level_count - 1}.')
    levels = list(range(level_count)) if level is None or is_encoder else [level]
    if is_encoder:
        chosen = np.array([query_at(layers, path, sample, pixel, level or 0)])
    else:
        chosen = np.asarray(queries or best_queries(layers, image, top_k))
    if chosen.max() >= count:
        raise ConfigError(f'query {chosen.max()} does not exist in {path}, which has {count}.')
    locations, weights, reference = (
        notes[name][image, chosen].double() for name in ('locations', 'weights', 'reference_points')
    )
    num_points = None
    if weights.dim() == 3:  # of levels with different numbers of points
        counts = notes['num_points'].tolist()
        locations = pad_points(locations, counts, np.nan, axis=2)
        weights = pad_points(weights, counts, 0.0, axis=2)
        num_points = tuple(counts[number] for number in levels)
    xy = to_image(locations.numpy()[:, :, levels], sample)
    of_levels = weights.numpy()[:, :, levels]
    centres = to_image(reference.numpy()[:, 0, :2], sample)
    boxes = None if is_encoder else _boxes(layers, sample, image, chosen)
    return SamplingPoints(path, xy, of_levels, centres, chosen, levels, is_encoder, num_points, boxes)


def _boxes(layers: Recording, sample: Sample, image: int, queries: np.ndarray) -> np.ndarray | None:
    """Return the boxes ``(q, 4)`` that a head predicts for queries, in pixels of the image on disk, or None."""
    head = predicted(layers)
    if head is None or head[1].ndim != 3:
        return None
    height, width = sample.ori_shape[:2]
    # Heads predict shares of the image without its padding: centre, width, height.
    centre, sides = np.split(head[1][image, queries].double().numpy() * [width, height, width, height], 2, axis=-1)
    return np.concatenate([centre - sides / 2, centre + sides / 2], axis=-1)


def compare_points(before: SamplingPoints, after: SamplingPoints) -> SamplingChange:
    """Compare the sampling points of the same queries in a vanilla and in a gated model.

    Raises:
        ConfigError: The two are of other layers, queries, heads, levels or points.
    """

    def identity(points: SamplingPoints) -> tuple[Any, ...]:
        return points.path, points.queries.tolist(), points.levels, points.weights.shape, points.num_points

    if identity(before) != identity(after):
        shapes = ' and '.join(
            f'{points.path}, queries {points.queries.tolist()}, (queries, heads, levels, points) {points.weights.shape}'
            + ('' if points.num_points is None else f', on levels {[*points.num_points]}')
            for points in (before, after)
        )
        raise ConfigError(f'a difference is of the same points of two models, and these have {shapes}.')
    return SamplingChange(before, after)


def density(xy: np.ndarray, weights: np.ndarray, size: tuple[int, int], steps: int = 96) -> np.ndarray | None:
    """Estimate the density of weighted points over an image, on a grid ``(steps, steps)``, with a Gaussian kernel.

    It is None where there is no spread to estimate, as for points on one line.
    """
    from scipy.stats import gaussian_kde

    points = xy.reshape(-1, 2).T
    shares = weights.ravel().clip(min=0) + 1e-12
    try:
        # Scott's width is taken from the number of points. By their effective number, scipy's default, it would grow as
        # weights concentrate.
        kernel = gaussian_kde(points, lambda kde: kde.n ** (-1 / 6), weights=shares)
    except (np.linalg.LinAlgError, ValueError):
        return None
    x, y = np.meshgrid(np.linspace(0, size[1], steps), np.linspace(0, size[0], steps))
    return kernel(np.stack([x.ravel(), y.ravel()])).reshape(steps, steps)
