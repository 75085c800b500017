"""Checks of samples as they come out of a pipeline: labels that the model has, sizes that can be stacked."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from .preflight import ConfigError


class DataError(ConfigError):
    """A file of the data set cannot be used; the message names it."""


# Some data sets skip what they cannot use, by the error that it raised.
class FileError(DataError, OSError):
    """A file cannot be read."""


class MissingFileError(FileError, FileNotFoundError):
    """A file is not there."""


class RefusedError(DataError, AssertionError):
    """A transform asserted something else than it met."""


def data_error_like(error: Exception) -> type[DataError]:
    """Return the kind of :class:`DataError` that is caught where ``error`` would be."""
    kinds = (MissingFileError, FileError, RefusedError)
    return next((kind for kind in kinds if isinstance(error, kind.__bases__[-1])), DataError)


Found = tuple[str, str] | None  # the key of the file to blame, and why


class LabelCheck:
    """Whether the labels of a sample are those of a model's classes.

    Args:
        classes: How many the model predicts.
        ignored: The label of what is no class.
    """

    def __init__(self, classes: int, ignored: int | None = None) -> None:
        self.classes, self.ignored = classes, ignored

    def __call__(self, sample: dict[str, Any]) -> Found:
        """Return the file to blame and why, or None."""
        labels, key = _labels(sample), 'seg_map_path'
        if labels is None:
            labels, key = getattr(sample.get('data_samples'), 'gt_label', None), 'img_path'
        if not isinstance(labels, Tensor) or not labels.numel() or int(labels.max()) < self.classes:
            return None
        wrong = labels[(labels >= self.classes) & (labels != (-1 if self.ignored is None else self.ignored))]
        if not wrong.numel():
            return None
        ignored = '' if self.ignored is None else f' and {self.ignored} for what is ignored'
        return key, (
            f'has the label {int(wrong[0])}, but the model has {self.classes} classes, from 0 on{ignored}. '
            'Correct the labels, raise num_classes with the classes of the data, or set reduce_zero_label where labels '
            'count from 1.'
        )


class LabelWarning:
    """Warns once of what a :class:`LabelCheck` finds: data to evaluate on may have labels that the model has not.

    Args:
        check: What is asked.
    """

    def __init__(self, check: LabelCheck) -> None:
        self.check, self.said = check, False

    def __call__(self, sample: dict[str, Any]) -> None:
        """Look at a sample."""
        found = None if self.said else self.check(sample)
        if found:
            self.said = True
            path = sample['data_samples'].get(found[0], found[0])
            warnings.warn(f'{path} {found[1]} What is beyond the classes lowers the result.', stacklevel=2)


class MapCheck:
    """Whether a sample's map of labels is one, and can be measured.

    Args:
        measured: Whether mIoU will be measured over it, which takes a map of the image's size.
    """

    def __init__(self, measured: bool = False) -> None:
        self.measured = measured

    def __call__(self, sample: dict[str, Any]) -> Found:
        """Return the file to blame and why, or None."""
        data: Any = sample.get('data_samples')
        # a list: several of one image, which are merged; more dimensions: a volume
        if data is None or isinstance(data, list) or getattr(sample.get('inputs'), 'ndim', 3) > 3:
            return None
        labels = _labels(sample)
        if labels is None:
            if not self.measured:
                return None
            return 'img_path', (
                'comes without a map of labels, which IoUMetric compares with. Give the data set '
                "data_prefix=dict(seg_map_path=...) and its pipeline dict(type='LoadAnnotations'), or only write "
                'predictions: test_evaluator.format_only=True test_evaluator.output_dir=DIR.'
            )
        shape = tuple(labels.shape)
        if len(shape) == 3 and shape[-1] in (3, 4) and shape[0] != 1:
            return 'seg_map_path', (
                f'is no map of labels: its shape is {shape}, where one channel (a grey or a palette '
                'PNG) with the number of the class in each pixel is needed; convert its colours to numbers.'
            )
        size = tuple(data.metainfo.get('ori_shape', ()))[:2]
        if self.measured and len(size) == 2 and shape[-2:] != size:
            return 'seg_map_path', (
                f'{_another_size(shape, size)} (after the pipeline). Give it the size of its image, or, if the file '
                'has it, put LoadAnnotations after Resize in the pipeline.'
            )
        return None


class MapSurvey:
    """Warns if the first maps of labels of a data set show nothing but class 0 and what is ignored.

    Args:
        ignored: The label of what is no class.
        maps: How many to look at.
    """

    def __init__(self, ignored: int, maps: int = 8) -> None:
        self.ignored, self.maps = ignored, maps
        self._left = maps
        self._labels: set[int] = set()

    def __call__(self, sample: dict[str, Any]) -> None:
        """Look at a sample."""
        labels = _labels(sample) if self._left else None
        if labels is None:
            return
        self._labels |= set(labels.unique().tolist())
        self._left -= 1
        if self._left or self.ignored not in self._labels or self._labels - {0, self.ignored}:
            return
        seen = 'have label 0 and' if 0 in self._labels else 'have'
        last = sample['data_samples'].get('seg_map_path', '')
        warnings.warn(
            f'the first {self.maps} maps of labels {seen} {self.ignored} alone, which is ignored: they have nothing to '
            f'tell apart (the last one: {last}). Masks of 0 and 255 are written as 0 and 1; '
            'reduce_zero_label=True lets what was 0 be ignored.',
            stacklevel=2,
        )


def _labels(sample: Any) -> Tensor | None:
    """Return the map of labels of a sample of mmseg or mmdet, if it is a single sample and has one."""
    found = getattr(sample.get('data_samples'), 'gt_sem_seg', None)
    labels = getattr(found, 'data', getattr(found, 'sem_seg', None))
    return labels if isinstance(labels, Tensor) else None


class SameSizeCollate:
    """Collates a batch; names the files of images that cannot be stacked.

    Args:
        collate: What makes a batch of samples.
        padded_to: Height and width to which mmseg's data preprocessor pads, if it is one; what is larger has to be of
            one size.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], padded_to: tuple[int, int] | None) -> None:
        self.collate, self.padded_to = collate, padded_to
        self._warned = False

    def __call__(self, batch: list[Any]) -> Any:
        """Collate, and look at the sizes where that fails or is going to."""
        if self.padded_to is not None:
            self._refuse_sizes(batch)
            self._refuse_maps(batch)
        try:
            return self.collate(batch)
        except RuntimeError:
            self._refuse_sizes(batch)
            raise

    def _refuse_sizes(self, batch: list[Any]) -> None:
        height, width = self.padded_to or (0, 0)
        sizes: dict[tuple[int, int], str] = {}
        for size, path in _sizes(batch):
            sizes.setdefault((max(size[0], height), max(size[1], width)), f'{path} is {size[1]} x {size[0]}')
        if len(sizes) > 1:
            padded = f', and data_preprocessor.size pads to {width} x {height} only' if self.padded_to else ''
            raise DataError(
                f'images of one batch differ in size: {", ".join(list(sizes.values())[:2])}{padded}. Let the pipeline '
                'resize or crop them to one size (Resize, RandomCrop).'
            )

    def _refuse_maps(self, batch: list[Any]) -> None:
        """Refuse maps of labels of which some have another size than their image; warn if all have."""
        wrong = []
        for sample in batch:
            labels = _labels(sample) if isinstance(sample, dict) else None
            if labels is not None and tuple(labels.shape[-2:]) != tuple(sample['inputs'].shape[-2:]):
                wrong.append((sample, labels))
        if not wrong or (self._warned and len(wrong) == len(batch)):
            return
        sample, labels = wrong[0]
        path = sample['data_samples'].metainfo.get('seg_map_path', '')
        found = _another_size(tuple(labels.shape), tuple(sample['inputs'].shape[-2:]))
        found = f'seg_map_path {path} {found} (after the pipeline). Give it the size of its image.'
        if len(wrong) < len(batch):  # they cannot be stacked
            raise DataError(found)
        self._warned = True
        warnings.warn(f'{found} It is padded or stretched for training, and may not fit.', stacklevel=2)


def _another_size(labels: tuple[int, ...], image: tuple[int, ...]) -> str:
    return f'is a map of {labels[-1]} x {labels[-2]} for an image of {image[1]} x {image[0]}'


def _sizes(batch: list[Any]) -> Iterator[tuple[tuple[int, int], str]]:
    for sample in batch:
        image = sample.get('inputs') if isinstance(sample, dict) else None
        if isinstance(image, Tensor) and image.dim() == 3:
            meta = getattr(sample.get('data_samples'), 'metainfo', {})
            yield (image.shape[1], image.shape[2]), str(meta.get('img_path', 'one'))
