"""Checks of data sets once they are built, before a run uses them."""

from __future__ import annotations

import os.path as osp
from collections.abc import Iterator
from typing import Any

from .coco_checks import check_coco_data, check_coco_metric
from .preflight import ConfigError


def wrapped(dataset: Any) -> list[Any]:
    """Return the data sets that a wrapper such as RepeatDataset or ConcatDataset holds; none of a plain data set."""
    inner = [getattr(dataset, 'dataset', None), *(getattr(dataset, 'datasets', None) or ())]
    return [one for one in inner if one is not None]


def innermost(dataset: Any) -> Iterator[Any]:
    """Yield the data sets inside wrappers, or the data set itself."""
    found = wrapped(dataset)
    for one in found:
        yield from innermost(one)
    if not found:
        yield dataset


def check_dataset(dataset: Any, where: str) -> None:
    """Refuse a data set without images, or whose classes are not those of its annotation file.

    Warns where labels go by another order than the classes' names.

    Args:
        dataset: As built, in wrappers or not.
        where: The config entry, for the messages.

    Raises:
        ConfigError: With the file and what to change.
    """
    for one in innermost(dataset):
        check_names(one, where)
        if hasattr(one, '__len__') and not len(one):
            raise ConfigError(f'{where}: {lacks(one)}.')


def check_names(dataset: Any, where: str) -> None:
    """Refuse classes that are no list of names, or of which the annotation file knows none.

    Raises:
        ConfigError: With both lists.
    """
    classes = (getattr(dataset, 'metainfo', None) or {}).get('classes')
    if isinstance(classes, str):
        raise ConfigError(
            f'{where}: metainfo.classes of {type(dataset).__name__} is the text {classes!r}. A tuple of one name has a '
            f'comma: classes=({classes!r},); a file of names would have to exist.'
        )
    if classes and getattr(dataset, 'cat2label', None) is not None:
        check_coco_data(dataset, list(classes), where)


def check_metrics(evaluator: Any, dataset: Any, predicted: int, where: str) -> None:
    """Refuse metrics that would fail after the first training, or after all images are predicted.

    Args:
        evaluator: As built.
        dataset: As built, in wrappers or not.
        predicted: Number of classes that the model predicts.
        where: The config entry, for the messages.

    Raises:
        ConfigError: mIoU over classes that nobody names, or what :func:`check_coco_metric` refuses.
    """
    measured = [dataset] * len(evaluator.metrics)
    if type(evaluator).__name__ == 'MultiDatasetsEvaluator':  # a metric for each part
        measured = wrapped(dataset)
    for metric, data in zip(evaluator.metrics, measured, strict=False):
        for one in innermost(data):
            if type(metric).__name__ == 'IoUMetric' and not (getattr(one, 'metainfo', None) or {}).get('classes'):
                raise ConfigError(
                    f'{where}: IoUMetric needs the names of the classes, and {type(one).__name__} has none. Set '
                    'metainfo=dict(classes=(...)) of the data set.'
                )
            check_coco_metric(metric, one, predicted, where)


def lacks(dataset: Any) -> str:
    """Return in words that a data set has no image, and where it looked for them."""
    name = type(dataset).__name__
    ann_file = str(getattr(dataset, 'ann_file', ''))
    folder = (getattr(dataset, 'data_prefix', None) or {}).get('img_path', '')
    if hasattr(dataset, 'img_suffix') and not osp.isfile(ann_file):
        return f'{name} has no image: it looked for *{dataset.img_suffix} in {folder}; set img_suffix to theirs'
    chosen = getattr(dataset, 'filter_cfg', None)
    filtered = f', or filter_cfg={dict(chosen)} leaves none (boxes of the classes, pixels a side)' if chosen else ''
    return f'{name} has no image to use: {ann_file or folder} lists none{filtered}'
