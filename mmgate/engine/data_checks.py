"""Checks of data sets once they are built, before a run uses them."""

from __future__ import annotations

import json
import os
import os.path as osp
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from .preflight import ConfigError

LARGEST_FILE = 32 << 20  # bytes of an annotation file that is read once more for its categories; a third of a second


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
        _check_categories(dataset, list(classes), where)


def check_metrics(metrics: Sequence[Any], dataset: Any, where: str) -> None:
    """Refuse to measure mIoU over classes that nobody names, which would fail after the first training.

    Raises:
        ConfigError: The data set has no ``metainfo.classes``.
    """
    if any(type(metric).__name__ == 'IoUMetric' for metric in metrics):
        for one in innermost(dataset):
            if not (getattr(one, 'metainfo', None) or {}).get('classes'):
                raise ConfigError(
                    f'{where}: IoUMetric needs the names of the classes, and {type(one).__name__} has none. Set '
                    'metainfo=dict(classes=(...)) of the data set.'
                )


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


def _check_categories(dataset: Any, classes: list[str], where: str) -> None:
    """Compare the classes with the categories of a COCO file."""
    ann_file, labels = str(dataset.ann_file), dict(dataset.cat2label)
    if not labels:
        found = _categories(ann_file)
        has = f', which has {listed([str(c.get("name")) for c in found])}' if found else ''
        raise ConfigError(
            f'{where}: none of the classes ({listed(classes)}) is a category of {ann_file}{has}. Set '
            'metainfo=dict(classes=(...)) to the names in the file, spelt as there.'
        )
    names = {labels[c['id']]: str(c.get('name')) for c in _categories(ann_file) if c.get('id') in labels}
    wrong = next(
        (label for label, name in sorted(names.items()) if label < len(classes) and classes[label] != name), None
    )
    if wrong is not None:
        warnings.warn(
            f'{where}: labels follow the order of the categories in {ann_file}, where label {wrong} is '
            f'{names[wrong]!r}; metainfo.classes calls it {classes[wrong]!r}. List the classes as the file does, '
            f'without those that it does not have: {listed([names[label] for label in sorted(names)])}.',
            stacklevel=2,
        )


def _categories(ann_file: str) -> list[dict[str, Any]]:
    """Return the categories of a local COCO file of moderate size."""
    if not osp.isfile(ann_file) or os.path.getsize(ann_file) > LARGEST_FILE:
        return []
    try:
        with open(ann_file, encoding='utf-8') as file:
            found = json.load(file).get('categories') or []
    except (ValueError, AttributeError):  # of a form that the data set's own class reads
        return []
    return [category for category in found if isinstance(category, dict)]


def listed(names: Sequence[Any], most: int = 8) -> str:
    """Return names in one line: all of them, or the first ones and the last."""
    texts = [str(name) for name in names]
    return ', '.join(texts if len(texts) <= most else [*texts[: most - 1], '...', texts[-1]])
