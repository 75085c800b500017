"""Compare the results of an exported file with PyTorch's on real images."""

from __future__ import annotations

import math
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from mmengine.model import BaseModel
from mmengine.structures import BaseDataElement, InstanceData
from torch import Tensor

from mmgate.errors import ConfigError, first_line

from .network import Network, Run

# A detection whose score is this close to the threshold may be missing in one of the results.
MARGIN = 1e-3
# Classes whose logits differ by less than this share of the largest logit are tied: rounding decides between them.
TIE = 1e-5
# Tolerated differences: corners of boxes in pixels of the original image, scores, and the share of the pixels of a
# class, an instance or a mask that differ.
TOLERATED = {'corners': 0.1, 'scores': 1e-3, 'shares of pixels': 1e-3}
# A share is of at least this number of pixels, so that one pixel at the edge of a small object is tolerated.
LEAST_AREA = 1000


@dataclass
class Differences:
    """The largest differences between PyTorch's results and the file's over all images, and how much was compared.

    Attributes:
        compared: Description of the batches that were compared.
        detections: Number of PyTorch's detections that were looked for.
        missing: Messages on detections that only one of the two has.
        largest: Largest differences by the names of :data:`TOLERATED`; infinite where one is NaN.
    """

    compared: str = ''
    detections: int = 0
    missing: list[str] = field(default_factory=list)
    largest: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TOLERATED, 0.0))

    def tolerated(self) -> bool:
        """Return True if nothing is missing and no difference is above its limit."""
        return not self.missing and all(self.largest[name] <= most for name, most in TOLERATED.items())

    def note(self, name: str, difference: float) -> None:
        """Keep a difference if it is the largest of its kind so far."""
        self.largest[name] = max(self.largest[name], difference if math.isfinite(difference) else math.inf)

    def __str__(self) -> str:
        parts = [self.compared] + [f'{self.detections} detections'] * bool(self.detections)
        parts += [f'{name} to {largest:.2g}' for name, largest in self.largest.items()]
        return ', '.join([*parts, *self.missing[:3]])


@torch.no_grad()
def check_finds_something(model: BaseModel, batches: Iterable[dict[str, Any]], threshold: float) -> None:
    """Raise ConfigError if PyTorch finds nothing in the images, because every file would agree with it there."""
    for batch in batches:
        try:
            results = model.test_step(deepcopy(batch))
        except Exception as error:
            raise ConfigError(
                f'PyTorch fails on these images, as tools/test.py would: {first_line(error)}. A segmentor that cuts '
                'images into windows may need test_cfg.mode=whole: --cfg-options model.test_cfg.mode=whole.'
            ) from error
        for result in results:
            found = 'pred_instances' in result and bool((result.pred_instances.scores > threshold).any())
            if found or any(len(classes.unique()) > 1 for classes in _maps(result)):
                return
    raise ConfigError(
        f'PyTorch finds no detection with a score above {threshold} and no map of two classes in these images, so they '
        'show nothing. Give images with objects by --images or --split, a trained checkpoint, or a lower --score-thr.'
    )


@torch.no_grad()
def compare(
    model: BaseModel, network: Network, run: Run, batches: Iterable[dict[str, Any]], *, threshold: float = 0.05
) -> Differences:
    """Run ``test_step`` of a model on batches, with PyTorch and with the exported file, and compare the results.

    Args:
        model: The model.
        network: Network of the model; from now on its model predicts with ``run``.
        run: Function of the network's inputs that returns its outputs: an exported file in either runtime.
        batches: Batches of a data loader.
        threshold: Detections with a lower score are not looked for.
    """
    network.serve(run)
    found = Differences()
    for batch in batches:
        pairs = zip(model.test_step(deepcopy(batch)), network.model.test_step(deepcopy(batch)), strict=True)
        for expected, actual in pairs:
            _compare_maps(expected, actual, found)
            if 'pred_instances' in expected:
                one = expected.pred_instances
                other = actual.pred_instances
                found.detections += int((one.scores > threshold).sum())
                _match(one, other, found, threshold, 'PyTorch')
                _match(other, one, found, threshold, 'the exported file')
    return found


def _maps(result: BaseDataElement) -> list[Tensor]:
    """Return the class map and the panoptic map of an image's result, those of the two that it has."""
    maps = []
    if 'pred_sem_seg' in result:
        maps.append(result.pred_sem_seg.data)
    if 'pred_panoptic_seg' in result:
        maps.append(result.pred_panoptic_seg.sem_seg)
    return maps


def _compare_maps(expected: BaseDataElement, actual: BaseDataElement, found: Differences) -> None:
    """Add the differences between PyTorch's and the file's maps of one image to ``found``."""
    for one, other in zip(_maps(expected), _maps(actual), strict=True):
        # A single logit is compared with a threshold and has no ties.
        if 'seg_logits' in expected and len(expected.seg_logits.data) > 1:
            logits = expected.seg_logits.data
            best = logits.max(0, keepdim=True).values
            tied = best - logits.gather(0, other) <= TIE * logits.abs().max()
            other = torch.where(tied, one, other)
        for label in torch.cat([one.unique(), other.unique()]).unique():
            found.note('shares of pixels', _share_apart(one == label, other == label))


def _share_apart(one: Tensor, other: Tensor) -> float:
    """Return the number of pixels in which two masks differ, as a share of the pixels that either has."""
    return int((one ^ other).sum()) / max(int((one | other).sum()), LEAST_AREA)


def _match(these: InstanceData, those: InstanceData, found: Differences, threshold: float, whose: str) -> None:
    """Match each detection of one result to the nearest of its class in the other, and keep the differences.

    No detection is used twice.
    """
    left = torch.ones_like(those.labels, dtype=torch.bool)
    for number in (these.scores > threshold + MARGIN).nonzero().flatten().tolist():
        label = int(these.labels[number])
        same = ((those.labels == label) & left).nonzero().flatten()
        if not len(same):
            found.missing.append(f'class {label} is found by {whose} alone')
            continue
        gaps = (these.bboxes[number] - those.bboxes[same]).abs().amax(-1)
        scores = (these.scores[number] - those.scores[same]).abs()
        # Scores tell equal boxes of several queries apart.
        nearest = (gaps + 1e-6 * scores).argmin()
        left[same[nearest]] = False
        found.note('corners', gaps[nearest].item())
        found.note('scores', scores[nearest].item())
        if 'masks' in these:
            found.note('shares of pixels', _share_apart(these.masks[number], those.masks[same[nearest]]))
