"""Whether an exported file finds what PyTorch finds, on real images."""

from __future__ import annotations

import math
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from mmengine.structures import InstanceData
from torch import Tensor

from mmgate.errors import ConfigError

from .network import Network

MARGIN = 1e-3  # of scores: what lies closer to the threshold may be found by one alone
TIE = 1e-5  # of the largest logit: classes that are as close are told apart by rounding alone
# How far results may be apart: corners of boxes in pixels of the original image, scores, the share of the pixels of a
# class, an instance or a mask that are another's.
TOLERATED = {'corners': 0.1, 'scores': 1e-3, 'shares of pixels': 1e-3}
LEAST_AREA = 1000  # pixels that a share is of at least, so that one at the edge of a small object is no difference


@dataclass
class Differences:
    """The largest differences over all images, and how much was compared.

    Attributes:
        what: What was compared, in words.
        images: Batches and images in them are counted as images.
        detections: Detections of PyTorch's that were looked for.
        missing: Detections that one of the two found alone.
        largest: By the names of :data:`TOLERATED`; infinite where a number is none.
    """

    what: str = ''
    images: int = 0
    detections: int = 0
    missing: list[str] = field(default_factory=list)
    largest: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TOLERATED, 0.0))

    def tolerated(self) -> bool:
        """Return whether all of it can be tolerated."""
        return not self.missing and all(self.largest[name] <= most for name, most in TOLERATED.items())

    def note(self, name: str, difference: float) -> None:
        """Keep a difference if it is the largest of its kind."""
        self.largest[name] = max(self.largest[name], difference if math.isfinite(difference) else math.inf)

    def __str__(self) -> str:
        parts = [self.what, f'{self.detections} detections'] if self.detections else [self.what]
        parts += [f'{name} to {largest:.2g}' for name, largest in self.largest.items()]
        return ', '.join([*parts, *self.missing[:3]])


def check_finds_something(model: Any, batches: Iterable[dict[str, Any]], threshold: float) -> None:
    """Refuse images in which PyTorch finds nothing above a score: any file would be as PyTorch there.

    Raises:
        ConfigError: There is no detection, and no map of more than one class.
    """
    with torch.no_grad():
        for result in (result for batch in batches for result in model.test_step(deepcopy(batch))):
            found = 'pred_instances' in result and bool((result.pred_instances.scores > threshold).any())
            if found or any(len(layer.unique()) > 1 for layer in _maps(result)):
                return
    raise ConfigError(
        f'PyTorch finds no detection with a score above {threshold} and no map of two classes in these images, so they '
        'show nothing. Give images with objects by --images or --split, a trained checkpoint, or a lower --score-thr.'
    )


def compare(
    model: Any, network: Network, run: Any, batches: Iterable[dict[str, Any]], *, threshold: float = 0.05
) -> Differences:
    """Test batches by a model and by what was exported from it, through the host's own ``test_step``.

    From here on the host of ``network`` answers by ``run``, a function of the network's inputs that returns its
    outputs. Detections whose score is below ``threshold`` are not looked for.
    """
    network.serve(run)
    found = Differences()
    with torch.no_grad():
        for batch in batches:
            expected = model.test_step(deepcopy(batch))
            actual = network.host.test_step(deepcopy(batch))
            for one, other in zip(expected, actual, strict=True):
                found.images += 1
                _compare(one, other, found, threshold)
    return found


def _maps(result: Any) -> list[Tensor]:
    """Return the class map and the panoptic map of a result, those that it has."""
    layers = (('pred_sem_seg', 'data'), ('pred_panoptic_seg', 'sem_seg'))
    return [getattr(getattr(result, key), layer) for key, layer in layers if key in result]


def _ties_settled(expected: Any, actual: Tensor) -> Tensor:
    """Return a class map with PyTorch's class wherever PyTorch's logits tie it with the map's own class."""
    if 'seg_logits' not in expected or len(expected.seg_logits.data) == 1:  # one logit is a threshold's
        return actual
    logits = expected.seg_logits.data
    best, classes = logits.max(0, keepdim=True)
    tied = best - logits.gather(0, actual) <= TIE * logits.abs().max()
    return torch.where(tied, classes, actual)


def _compare(expected: Any, actual: Any, found: Differences, threshold: float) -> None:
    for one, other in zip(_maps(expected), _maps(actual), strict=True):
        other = _ties_settled(expected, other)
        for label in torch.cat([one.unique(), other.unique()]).unique():
            found.note('shares of pixels', _apart(one == label, other == label))
    if 'pred_instances' in expected:
        one, other = expected.pred_instances, actual.pred_instances
        found.detections += int((one.scores > threshold).sum())
        _match(one, other, found, threshold, 'PyTorch')
        _match(other, one, found, threshold, 'the exported file')


def _apart(one: Tensor, other: Tensor) -> float:
    return int((one ^ other).sum()) / max(int((one | other).sum()), LEAST_AREA)


def _match(these: InstanceData, those: InstanceData, found: Differences, threshold: float, whose: str) -> None:
    """Look for each detection of ``these`` among ``those``, by class and place, for each another one."""
    left = torch.ones_like(those.labels, dtype=torch.bool)
    for number in (these.scores > threshold + MARGIN).nonzero().flatten().tolist():
        label = int(these.labels[number])
        same = ((those.labels == label) & left).nonzero().flatten()
        if not len(same):
            found.missing.append(f'class {label} is found by {whose} alone')
            continue
        gaps = (these.bboxes[number] - those.bboxes[same]).abs().amax(-1)
        scores = (these.scores[number] - those.scores[same]).abs()
        nearest = (gaps + 1e-6 * scores).argmin()  # equal boxes of several queries are told apart by their scores
        left[same[nearest]] = False
        found.note('corners', gaps[nearest].item())
        found.note('scores', scores[nearest].item())
        if 'masks' in these:
            found.note('shares of pixels', _apart(these.masks[number], those.masks[same[nearest]]))
