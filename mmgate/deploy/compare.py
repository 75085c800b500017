"""Whether an exported file finds what PyTorch finds, on real images."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from mmengine.structures import InstanceData
from torch import Tensor, nn

from mmgate.engine.preflight import ConfigError

from .network import Network

MARGIN = 1e-3  # of scores: what lies closer to the threshold may be found by one alone


@dataclass
class Tolerances:
    """How far results may be apart.

    Attributes:
        pixels: Corners of boxes, in pixels of the original image.
        score: Scores of detections.
        share: Share of an image's pixels whose class, instance or mask is another.
    """

    pixels: float = 0.1
    score: float = 1e-3
    share: float = 1e-3


@dataclass
class Differences:
    """The largest differences over all images, and how much was compared.

    Attributes:
        images: Batches and images in them are counted as images.
        detections: Detections of PyTorch's that were looked for.
        missing: Detections that one of the two found alone.
        pixels: See :class:`Tolerances`.
        score: Likewise.
        share: Likewise.
    """

    images: int = 0
    detections: int = 0
    missing: list[str] = field(default_factory=list)
    pixels: float = 0.0
    score: float = 0.0
    share: float = 0.0

    def within(self, tolerances: Tolerances) -> bool:
        """Return whether all of it can be tolerated."""
        near = all(getattr(self, name) <= getattr(tolerances, name) for name in ('pixels', 'score', 'share'))
        return near and not self.missing

    def __str__(self) -> str:
        parts = [f'{self.images} images']
        if self.detections:
            parts += [f'{self.detections} detections', f'boxes to {self.pixels:.2g} px', f'scores to {self.score:.2g}']
        parts.append(f'{self.share:.2g} of the pixels differ')
        return ', '.join(parts + self.missing[:3])


class NothingFound(ConfigError):
    """PyTorch finds nothing in the images, so that any file would pass."""


def compare(
    model: nn.Module, network: Network, run: Any, batches: Iterable[dict[str, Any]], *, threshold: float = 0.05
) -> Differences:
    """Test batches by a model and by what was exported from it, through the host's own ``test_step``.

    Args:
        model: The model in PyTorch, untouched.
        network: What was exported; its host answers by ``run`` from here on.
        run: A function of the network's inputs that returns its outputs.
        batches: Of a data loader, of real images.
        threshold: Detections whose score is below it are not looked for.

    Raises:
        NothingFound: PyTorch itself detects nothing, so that anything would pass.
    """
    network.serve(run)
    found, detects = Differences(), False
    with torch.no_grad():
        for batch in batches:
            expected = model.test_step(deepcopy(batch))  # type: ignore[operator]
            actual = network.host.test_step(deepcopy(batch))
            for one, other in zip(expected, actual, strict=True):
                found.images += 1
                detects |= 'pred_instances' in one
                _compare(one, other, found, threshold)
    if detects and not found.detections:
        raise NothingFound(
            f'PyTorch finds no detection with a score above {threshold} on these {found.images} images, so they show '
            'nothing. Give images with objects by --images or --split, or a lower --score-thr.'
        )
    return found


def _compare(expected: Any, actual: Any, found: Differences, threshold: float) -> None:
    for key, layer in (('pred_sem_seg', 'data'), ('pred_panoptic_seg', 'sem_seg')):
        if key in expected:
            one, other = (getattr(getattr(sample, key), layer) for sample in (expected, actual))
            found.share = max(found.share, (one != other).double().mean().item())
    if 'pred_instances' in expected:
        one, other = expected.pred_instances, actual.pred_instances
        found.detections += int((one.scores > threshold).sum())
        _match(one, other, found, threshold, 'PyTorch')
        _match(other, one, found, threshold, 'the exported file')


def _match(these: InstanceData, those: InstanceData, found: Differences, threshold: float, whose: str) -> None:
    """Look for each detection of ``these`` among ``those``, by class and place."""
    for number in (these.scores > threshold + MARGIN).nonzero().flatten().tolist():
        label = int(these.labels[number])
        same = (those.labels == label).nonzero().flatten()
        if not len(same):
            found.missing.append(f'class {label} is found by {whose} alone')
            continue
        gaps = _gaps(these, number, those, same)
        nearest = same[gaps.argmin()]
        found.pixels = max(found.pixels, gaps.min().item())
        found.score = max(found.score, abs(float(these.scores[number] - those.scores[nearest])))
        if 'masks' in these:
            apart = (these.masks[number] != those.masks[nearest]).double().mean().item()
            found.share = max(found.share, apart)


def _gaps(these: InstanceData, number: int, those: InstanceData, same: Tensor) -> Tensor:
    """Return the largest distance of corners between one detection and each of ``same``; of scores where no boxes are.

    Mask2Former's boxes are not predicted, but those around its masks, and empty masks have none.
    """
    gaps = (these.bboxes[number] - those.bboxes[same]).abs().amax(-1)
    scores = (these.scores[number] - those.scores[same]).abs()
    return gaps + 1e-6 * scores  # equal boxes of several queries are told apart by their scores
