"""Where deformable attention samples: points on the image, their weights and levels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmgate.analysis.probes.measures import pixel_centres
from mmgate.analysis.probes.recording import Recording, record_with_head
from mmgate.errors import ConfigError

READINGS = ('locations', 'weights', 'reference_points', 'spatial_shapes', 'gate')
_HEAD = 'bbox_head'


@dataclass(frozen=True)
class SamplingPoints:
    """Sampling points of some queries in one layer, on the image as it lies on disk.

    Attributes:
        path: Of the layer.
        xy: ``(q, H, L, P, 2)``, pixels; 0 is the left or upper edge of the image.
        weights: ``(q, H, L, P)``.
        reference: ``(q, 2)``, pixels: the reference point, or the centre of the reference box.
        queries: Which queries, ``(q,)``.
        levels: Which levels, ``(L,)``; 0 is the finest.
        is_encoder: Whether the queries are the pixels of the levels.
    """

    path: str
    xy: np.ndarray
    weights: np.ndarray
    reference: np.ndarray
    queries: np.ndarray
    levels: Sequence[int]
    is_encoder: bool

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row of the CSV for each point."""
        for place in np.ndindex(*self.weights.shape):
            query, head, level, point = place
            x, y = self.xy[place]
            numbers = dict(query=int(self.queries[query]), head=head, level=self.levels[level], point=point)
            yield dict(layer=self.path, **numbers, x=float(x), y=float(y), weight=float(self.weights[place]))


def record_sampling(model: nn.Module) -> AbstractContextManager[dict[str, Any]]:
    """Record sampling points of every deformable attention, and the detection head's scores and boxes, if there is one.

    Returns:
        A context that yields ``layers``: a recording; ``head``: ``(scores (B, Q, classes), boxes (B, Q, 4))`` of the
        last layer after the forward pass, or None.
    """
    return record_with_head(model, READINGS, [_HEAD], _scores_and_boxes)


def _scores_and_boxes(head: nn.Module, output: Any) -> tuple[Tensor, Tensor] | None:
    if not (isinstance(output, tuple) and len(output) >= 2 and all(isinstance(x, Tensor) for x in output[:2])):
        return None
    scores, boxes = (x[-1].detach().float().cpu() for x in output[:2])
    return scores, boxes


def encoder_layers(layers: Recording) -> list[str]:
    """Return the paths of the layers whose queries are the pixels of the levels."""
    return [path for path in _deformable(layers) if _is_encoder(layers[path])]


def decoder_layers(layers: Recording) -> list[str]:
    """Return the paths of the layers whose queries are objects."""
    return [path for path in _deformable(layers) if not _is_encoder(layers[path])]


def best_queries(head: tuple[Tensor, Tensor] | None, image: int, top_k: int) -> np.ndarray:
    """Return the ``top_k`` queries of an image by their best class, best first; the first ones without a head."""
    if head is None:
        return np.arange(top_k)
    scores = head[0][image].max(-1).values
    return scores.topk(min(top_k, len(scores))).indices.numpy()


def pixel_query(shapes: Tensor, x: float, y: float, level: int) -> int:
    """Return the encoder's query at ``(x, y)``, 0 to 1 over the padded input, on a level.

    Raises:
        ConfigError: There is no such level, or the point lies outside.
    """
    sizes = shapes.tolist()
    if not 0 <= level < len(sizes):
        raise ConfigError(f'level {level} does not exist; the model has levels 0 to {len(sizes) - 1}.')
    if not (0 <= x < 1 and 0 <= y < 1):
        raise ConfigError(f'the pixel lies at ({x:.3f}, {y:.3f}) of the padded image, and has to lie in 0 to 1.')
    height, width = sizes[level]
    return sum(h * w for h, w in sizes[:level]) + int(y * height) * width + int(x * width)


def to_image(xy: np.ndarray, sample: Any) -> np.ndarray:
    """Take (x, y), 0 to 1 over the padded batch, to pixels of the image on disk."""
    height, width = sample.get('batch_input_shape') or sample.img_shape[:2]
    scale = np.asarray(sample.get('scale_factor') or (1.0, 1.0), np.float64)[:2]
    return xy * np.array([width, height]) / scale


def from_image(xy: tuple[float, float], sample: Any) -> tuple[float, float]:
    """Take a pixel of the image on disk to (x, y), 0 to 1 over the padded batch.

    Raises:
        ConfigError: The pixel lies outside of the image.
    """
    height, width = sample.ori_shape[:2]
    if not (0 <= xy[0] < width and 0 <= xy[1] < height):
        raise ConfigError(f'the pixel ({xy[0]:g}, {xy[1]:g}) lies outside of the image of {width} x {height}.')
    x, y = np.array(xy) / to_image(np.ones(2), sample)
    return float(x), float(y)


def query_at(layers: Recording, path: str, sample: Any, pixel: Any = None, level: int = 0) -> int:
    """Return the query of an encoder's layer at a pixel ``(x, y)`` of the image on disk (default: its middle).

    Raises:
        ConfigError: There is no such level, or the pixel lies outside of the image.
    """
    height, width = sample.ori_shape[:2]
    x, y = from_image(pixel or (width / 2, height / 2), sample)
    return pixel_query(layers[path]['spatial_shapes'].tensors[-1], x, y, level)


def sampling_points(
    layers: Recording, path: str, sample: Any, queries: Any, image: int = 0, level: int | None = None
) -> SamplingPoints:
    """Return the points of ``queries`` in the layer ``path``.

    Args:
        layers: Of :func:`record_sampling`, of one forward pass.
        path: Of the layer.
        sample: The image's data sample, with ``img_shape``, ``scale_factor`` and, in a padded batch,
            ``batch_input_shape``.
        queries: Their numbers.
        image: The image's place in the batch.
        level: The points of this level alone.

    Raises:
        ConfigError: A query or the level does not exist.
    """
    readings = {name: found.tensors[-1] for name, found in layers[path].items()}
    queries, count = np.asarray(queries), readings['locations'].shape[1]
    if queries.size and queries.max() >= count:
        raise ConfigError(f'query {queries.max()} does not exist in {path}, which has {count}.')
    count = readings['locations'].shape[3]
    levels = range(count) if level is None else [level]
    if not 0 <= levels[0] < count:
        raise ConfigError(f'level {level} does not exist; the model has levels 0 to {count - 1}.')
    chosen = torch.from_numpy(queries)
    reference = readings['reference_points'][image][chosen, 0, :2].double().numpy()
    return SamplingPoints(
        path,
        to_image(readings['locations'][image][chosen][:, :, list(levels)].double().numpy(), sample),
        readings['weights'][image][chosen][:, :, list(levels)].double().numpy(),
        to_image(reference, sample),
        queries,
        levels,
        _is_encoder(layers[path]),
    )


def density(xy: np.ndarray, weights: np.ndarray, size: tuple[int, int], steps: int = 96) -> np.ndarray | None:
    """Return a Gaussian kernel density of points on a grid over an image of ``(height, width)``.

    Returns:
        ``(steps, steps)``, or None where there is no spread to estimate, as in points on one line.
    """
    from scipy.stats import gaussian_kde

    try:
        # Scott's width of as many points as there are: of their effective number it would grow as weights concentrate
        kernel = gaussian_kde(
            xy.reshape(-1, 2).T, lambda kde: kde.n ** (-1 / 6), weights=weights.ravel().clip(min=0) + 1e-12
        )
    except (np.linalg.LinAlgError, ValueError):
        return None
    x, y = np.meshgrid(np.linspace(0, size[1], steps), np.linspace(0, size[0], steps))
    return kernel(np.stack([x.ravel(), y.ravel()])).reshape(steps, steps)


def mean_density(points: Sequence[SamplingPoints], samples: Sequence[Any], steps: int = 96) -> np.ndarray:
    """Return the density of the points on the finest level over a set of images, ``(steps, steps)``.

    Every point counts alike, whatever its weight; places are shares of the images' heights and widths, so that images
    of any size come together, and 1 is an even density.

    Args:
        points: Of the best queries of each image.
        samples: The images' data samples.
        steps: Of the grid.

    Raises:
        ConfigError: The points have no spread to estimate a density from.

    Source: PLuG, appendix G and Fig. 9, there of one image.
    """
    shares = [
        found.xy[:, :, list(found.levels).index(0)].reshape(-1, 2) / np.array(sample.ori_shape[1::-1])
        for found, sample in zip(points, samples, strict=True)
    ]
    together = np.concatenate(shares)
    estimated = density(together, np.ones(len(together)), (1, 1), steps)
    if estimated is None:
        raise ConfigError(f'{len(together)} sampling points of no spread have no density.')
    return estimated


def sampling_picture(found: dict[str, Any], sample: Any, image: int, *, top_k: int) -> tuple[str, np.ndarray]:
    """Return the name and the picture ``(h, w, 3)`` of the last layer's points: a decoder's, else an encoder's."""
    from mmgate.analysis.figures.sampling import draw_sampling

    layers = found['layers']
    decoder, encoder = decoder_layers(layers), encoder_layers(layers)
    if decoder:
        path, queries = decoder[-1], best_queries(found['head'], image, top_k)
    else:
        path = encoder[-1]
        queries = np.array([query_at(layers, path, sample)])
    points = sampling_points(layers, path, sample, queries, image)
    return Path(sample.img_path).stem, draw_sampling([('', points, sample)], None)


def _deformable(layers: Recording) -> list[str]:
    return [path for path, readings in layers.items() if 'locations' in readings]


def _is_encoder(readings: dict[str, Any]) -> bool:
    """Return whether the reference points of a layer are the centres of the levels' pixels, one after the other."""
    shapes, points = (readings[name].tensors[-1] for name in ('spatial_shapes', 'reference_points'))
    points = points[0, :, 0, :2].double()
    if len(points) != int(shapes.prod(-1).sum()):
        return False
    areas = shapes.prod(-1).tolist()
    levels = zip(points.split(areas), pixel_centres(shapes.tolist()).double().split(areas), strict=True)
    # an image that is smaller than its batch moves those of a level by one factor each way
    return all(torch.allclose(found / found[-1], centres / centres[-1], atol=1e-3) for found, centres in levels)
