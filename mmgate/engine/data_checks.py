"""Checks of data sets once they are built, before a run uses them."""

from __future__ import annotations

import os.path as osp
import warnings
from collections.abc import Iterator
from typing import Any

from .coco_checks import check_coco_data, check_coco_metric
from .preflight import ConfigError, is_of_hosts


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


def check_dataset(dataset: Any, where: str, *, trains: bool) -> None:
    """Refuse a data set without images, or one to train on whose classes are not those of its annotation file.

    Warns where labels go by another order than the classes' names.

    Args:
        dataset: As built, in wrappers or not.
        where: The config entry, for the messages.
        trains: Whether it is trained on.

    Raises:
        ConfigError: With the file and what to change.
    """
    for one in innermost(dataset):
        check_names(one, where, needed=trains)
        if hasattr(one, '__len__') and not len(one):
            raise ConfigError(f'{where}: {lacks(one)}.')
        check_folders(one, where)


def check_names(dataset: Any, where: str, *, needed: bool) -> None:
    """Compare the classes of a data set with its annotation file, as :func:`check_coco_data` does.

    Warns of classes that are no list of names.

    Raises:
        ConfigError: Labels are needed, and none of the classes is in the file.
    """
    classes = (getattr(dataset, 'metainfo', None) or {}).get('classes')
    if isinstance(classes, str):
        warnings.warn(
            f'{where}: metainfo.classes of {type(dataset).__name__} is the text {classes!r}. A tuple of one name has a '
            f'comma: classes=({classes!r},); a file of names would have to exist.',
            stacklevel=2,
        )
        classes = [classes]
    if classes and getattr(dataset, 'cat2label', None) is not None:
        check_coco_data(dataset, list(classes), where, needed=needed)


def check_folders(dataset: Any, where: str) -> None:
    """Refuse a data set whose first image, or its map of labels, is in a folder that is not there.

    What the pipeline reads by transforms of its own, or from elsewhere than the disk, is not looked for.

    Raises:
        ConfigError: With the path.
    """
    if getattr(dataset, 'backend_args', None) or not getattr(dataset, '_fully_initialized', False):
        return
    info = dataset.get_data_info(0)
    transforms = getattr(getattr(dataset, 'pipeline', None), 'transforms', ())
    for path in (info.get(_read_by(transform)) for transform in transforms):
        if isinstance(path, str) and '://' not in path and not osp.isdir(osp.dirname(osp.abspath(path))):
            raise ConfigError(
                f'{where}: {path} does not exist, nor does its folder. Put the data set there, link it, or set '
                'data_root and data_prefix to where it is.'
            )


def _read_by(transform: Any) -> str:
    """Return the key of the file on the disk that a transform of the mm packages reads for every sample, if any."""
    elsewhere = getattr(transform, 'backend_args', None) or getattr(transform, 'file_client_args', None)
    if elsewhere or not is_of_hosts(type(transform)):
        return ''
    if type(transform).__name__ == 'LoadImageFromFile':
        return 'img_path'
    return 'seg_map_path' if type(transform).__name__ == 'LoadAnnotations' and transform.with_seg else ''


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
        # of several data sets the first one's
        if type(metric).__name__ == 'IoUMetric' and not (getattr(data, 'metainfo', None) or {}).get('classes'):
            raise ConfigError(
                f'{where}: IoUMetric needs the names of the classes, and {type(next(innermost(data))).__name__} has '
                'none. Set metainfo=dict(classes=(...)) of the data set.'
            )
        for one in innermost(data):
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
