"""Record the sampling points of deformable attention, and place them on the image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from mmgate.analysis.probes.recording import PREDICTIONS, best_queries, padded_size, predicted, record
from mmgate.errors import ConfigError
from mmgate.notes import POINTS, Recording
from mmgate.ops.deformable.uneven import pad_points


@dataclass(frozen=True)
class SamplingPoints:
    """The sampling points of some queries in one layer: their places on the image, their weights and levels.

    Places ``xy`` ``(q, H, L, P, 2)`` are pixels of the image on disk, ``weights`` ``(q, H, L, P)``. ``reference``
    ``(q, 2)`` holds the queries' reference points, or the centres of their boxes; level 0 is the finest; an encoder's
    queries are the pixels of its levels. If levels have different numbers of points, P is the largest, and places of
    missing points are NaN. ``boxes`` ``(q, 4)`` are those that a head predicts for the queries of a decoder, as
    (x, y, x, y); None without one.
    """

    path: str
    xy: np.ndarray
    weights: np.ndarray
    reference: np.ndarray
    queries: np.ndarray
    levels: list[int]
    is_encoder: bool
    boxes: np.ndarray | None = None

    @property
    def there(self) -> np.ndarray:
        """Mask ``(L, P)`` of the points that exist, where levels have different numbers of points."""
        return ~np.isnan(self.xy[0, 0, :, :, 0])

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for a CSV file for each sampling point."""
        there = self.there
        for place in np.ndindex(*self.weights.shape):
            query, head, level, point = place
            if there[level, point]:
                numbers = dict(query=int(self.queries[query]), head=head, level=self.levels[level], point=point)
                x, y, weight = (float(value) for value in (*self.xy[place], self.weights[place]))
                yield dict(layer=self.path, **numbers, x=x, y=y, weight=weight)


@dataclass(frozen=True)
class SamplingChange:
    """Sampling points of the same queries in two models: ``before`` in the vanilla one, ``after`` in the gated one.

    Raises:
        ConfigError: The two are of other layers, queries, heads, levels or points.
    """

    before: SamplingPoints
    after: SamplingPoints

    def __post_init__(self) -> None:
        names = [
            f'{x.path}, queries {x.queries.tolist()}, (queries, heads, levels, points) {x.weights.shape}, '
            f'{x.there.sum(-1).tolist()} on levels {x.levels}'
            for x in (self.before, self.after)
        ]
        if names[0] != names[1]:
            raise ConfigError(
                f'a difference is of the same points of two models, and these have {" and ".join(names)}.'
            )

    @property
    def weights(self) -> np.ndarray:
        """The weight that each point gained by the gates, ``(q, H, L, P)``, negative where it lost some."""
        return self.after.weights - self.before.weights

    @property
    def moved(self) -> float:
        """The share of attention, 0 to 1, that the gates moved from some points to others, averaged over queries."""
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
        return float(np.average(distances, weights=np.abs(self.before.weights)[:, :, there] + 1e-12))

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


def to_image(xy: np.ndarray, sample: Any) -> np.ndarray:
    """Convert places (x, y) from shares of the padded input, 0 to 1, to pixels of the image on disk."""
    height, width = padded_size(sample)
    scale = np.asarray(sample.get('scale_factor') or (1.0, 1.0), np.float64)[:2]
    return xy * np.array([width, height]) / scale


def query_at(
    layers: Recording, path: str, sample: Any, pixel: tuple[float, float] | None = None, level: int = 0
) -> int:
    """Return the number of an encoder's query at a pixel ``(x, y)`` of the image on disk; by default its middle.

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
    sample: Any,
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
            ``batch_input_shape``; or an :class:`ImageSample`.
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
    if weights.dim() == 3:  # of levels with different numbers of points
        counts = notes['num_points'].tolist()
        locations = pad_points(locations, counts, np.nan, axis=2)
        weights = pad_points(weights, counts, 0.0, axis=2)
    xy = to_image(locations.numpy()[:, :, levels], sample)
    centres = to_image(reference.numpy()[:, 0, :2], sample)
    boxes = None if is_encoder else _boxes(layers, sample, image, chosen)
    return SamplingPoints(path, xy, weights.numpy()[:, :, levels], centres, chosen, levels, is_encoder, boxes)


def _boxes(layers: Recording, sample: Any, image: int, queries: np.ndarray) -> np.ndarray | None:
    """Return the boxes ``(q, 4)`` that a head predicts for queries, in pixels of the image on disk, or None."""
    head = predicted(layers)
    if head is None or head[1].ndim != 3:
        return None
    height, width = sample.ori_shape[:2]
    # Heads predict shares of the image without its padding: centre, width, height.
    centre, sides = np.split(head[1][image, queries].double().numpy() * [width, height, width, height], 2, axis=-1)
    return np.concatenate([centre - sides / 2, centre + sides / 2], axis=-1)


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
