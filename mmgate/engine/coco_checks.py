"""Checks of COCO annotation files: what the mm tools leave out without a word, or meet only after a training."""

from __future__ import annotations

import json
import os
import os.path as osp
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .preflight import ConfigError, is_of_hosts

LARGEST_FILE = 32 << 20  # bytes of an annotation file that is read once more for the checks; under a second
MOST_IMAGES = 20_000  # of a data set whose images are looked for in the evaluator's file; a third of a second
_MEASURED = {'bbox': ('area', 'iscrowd'), 'segm': ('area', 'iscrowd', 'segmentation')}  # read of each annotation


def check_coco_data(dataset: Any, classes: list[str], where: str, *, needed: bool) -> None:
    """Compare a data set with its annotation file, as built: classes, and what was read of the file.

    Warns of labels in another order than the classes, of classes without a category, of annotations whose image is not
    listed, and of images whose number another one has. A data set that reads its file in a way of its own is not
    checked.

    Args:
        dataset: As built.
        classes: Names that it was given.
        where: The config entry, for the messages.
        needed: Whether the run fails or learns nothing without annotations; if not, the two errors are warnings.

    Raises:
        ConfigError: No class is a category of the file, or no annotation is of one of its images.
    """
    if not all(is_of_hosts(getattr(type(dataset), name, None)) for name in ('load_data_list', 'parse_data_info')):
        return
    ann_file, content = str(dataset.ann_file), _content(str(dataset.ann_file))
    annotations = _dicts(content, 'annotations')
    if dataset.cat2label:
        _check_labels(dict(dataset.cat2label), ann_file, _dicts(content, 'categories'), classes, where)
    elif annotations or not content:  # what is not labelled needs no category
        names = [category.get('name') for category in _dicts(content, 'categories')]
        found = f', which has {listed(names)}' if names else ''
        _refuse_or_warn(
            f'{where}: none of the classes ({listed(classes)}) is a category of {ann_file}{found}. Set '
            'metainfo=dict(classes=(...)) to the names in the file, spelt as there.',
            needed,
        )
    if content.get('images'):
        _check_images(ann_file, _dicts(content, 'images'), annotations, where, needed)


def check_coco_metric(metric: Any, dataset: Any, predicted: int, where: str) -> None:
    """Refuse a CocoMetric whose file lacks what it reads once all images are predicted.

    Warns of classes that are no category of the file, of a model that predicts more, and of images that the file does
    not list: the evaluation fails once something is found in them.

    Args:
        metric: As built; a subclass or one without a file of its own is not checked.
        dataset: What is evaluated.
        predicted: Number of classes that the model predicts.
        where: The config entry, for the messages.

    Raises:
        ConfigError: The file has none of the classes or images, or annotations without what is measured.
    """
    api = getattr(metric, '_coco_api', None)
    if api is None or type(metric).__name__ != 'CocoMetric':
        return
    meta = getattr(dataset, 'metainfo', None) or {}
    named = meta.get('thing_classes') or meta.get('classes') or ()
    classes = [named] if isinstance(named, str) else list(named)
    categories = api.get_cat_ids(cat_names=classes)
    found = [api.cats[one]['name'] for one in categories]
    names = listed(found) or 'none'
    # one that is missing at the end moves no other
    if len(set(classes)) > len(found) and (not found or found != classes[: len(found)]):
        _refuse_or_warn(
            f"{where}: CocoMetric's ann_file has {len(categories)} of the {len(classes)} classes as categories: "
            f'{names}. Labels are taken for these in this order. If the training data have others, add the rest to '
            '"categories" of the file.',
            not found,
        )
    predicted = predicted or len(classes)
    if classes and predicted > len(categories) and 'thing_classes' not in meta:
        warnings.warn(
            f"{where}: the model predicts {predicted} classes, and CocoMetric's ann_file has {len(categories)}: "
            f'{names}. The evaluation fails once one beyond them is found. Set num_classes of the heads.',
            stacklevel=2,
        )
    if not metric.format_only:
        _check_annotations(api, metric.metrics, set(categories), where)
        _check_same_images(api, dataset, where)


def _check_labels(
    labels: dict[Any, int], ann_file: str, found: list[dict[str, Any]], classes: list[str], where: str
) -> None:
    """Warn of classes in another order than the file's categories, by which mmdet gives labels, or beyond them."""
    if len(set(labels.values())) < len(labels):  # several categories are one class
        return
    names = {labels[c['id']]: str(c.get('name')) for c in found if c.get('id') in labels}
    wrong = next(
        (label for label, name in sorted(names.items()) if label < len(classes) and classes[label] != name), None
    )
    if wrong is not None:
        warnings.warn(
            f'{where}: labels follow the order of the categories in {ann_file}, where label {wrong} is '
            f'{names[wrong]!r}; metainfo.classes calls it {classes[wrong]!r}. The names in the file, in its order: '
            f'{listed([names[label] for label in sorted(names)])}.',
            stacklevel=2,
        )
    elif len(labels) < len(classes):
        known = set(names.values())
        lacking = [name for name in classes if name not in known] if names else []
        warnings.warn(
            f'{where}: {ann_file} has {len(labels)} of the {len(classes)} classes as categories'
            + (f'; it lacks {listed(lacking)}.' if lacking else '.'),
            stacklevel=2,
        )


def _check_images(
    ann_file: str, images: list[dict[str, Any]], annotations: list[dict[str, Any]], where: str, needed: bool
) -> None:
    numbers = {image.get('id') for image in images}
    if len(numbers) < len(images):
        warnings.warn(
            f'{where}: {len(images) - len(numbers)} of {len(images)} images in {ann_file} have the "id" of another '
            'one, and are not used. Give each its own.',
            stacklevel=2,
        )
    stray = [one for one in annotations if one.get('image_id') not in numbers]
    if stray:
        _refuse_or_warn(
            f'{where}: {len(stray)} of {len(annotations)} annotations in {ann_file} are of no image that it lists '
            f'(image_id {stray[0].get("image_id")!r}; the images have id {listed([repr(one) for one in numbers], 3)}), '
            'and are not used. Write image_id as the images have it, text or number.',
            needed and len(stray) == len(annotations),
        )


def _check_annotations(api: Any, measured: Iterable[str], categories: set[Any], where: str) -> None:
    keys = {key for name in measured for key in _MEASURED.get(name, ())}
    for annotation in _dicts(api.dataset, 'annotations'):
        lacking = keys - annotation.keys() if annotation.get('category_id') in categories else ()
        if lacking:
            raise ConfigError(
                f"{where}: annotation {annotation.get('id')} in CocoMetric's ann_file has no {', '.join(lacking)}, "
                'which COCO\'s evaluation reads. Write them into the file ("iscrowd": 0 for single objects, "area": '
                "the object's pixels)."
            )


def _check_same_images(api: Any, dataset: Any, where: str) -> None:
    if not hasattr(dataset, 'get_data_info') or not 0 < len(dataset) <= MOST_IMAGES:
        return
    infos = [info for number in range(len(dataset)) if 'img_id' in (info := dataset.get_data_info(number))]
    strange = [info for info in infos if info['img_id'] not in api.imgs]
    if strange:
        first = strange[0]
        _refuse_or_warn(
            f"{where}: CocoMetric's ann_file does not list {len(strange)} of the {len(infos)} images of the data set "
            f'({first["img_id"]!r}, {first.get("img_path")}). Set ann_file of both to the same file.',
            len(strange) == len(infos),
        )


def _refuse_or_warn(found: str, certain: bool) -> None:
    if certain:
        raise ConfigError(found)
    warnings.warn(found, stacklevel=3)


def _content(ann_file: str) -> dict[str, Any]:
    """Return what a local COCO file of moderate size holds."""
    if not osp.isfile(ann_file) or os.path.getsize(ann_file) > LARGEST_FILE:
        return {}
    try:
        with open(ann_file, encoding='utf-8') as file:
            found = json.load(file)
    except ValueError:  # of a form that the data set's own class reads
        return {}
    return found if isinstance(found, dict) else {}


def _dicts(content: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    return [one for one in content.get(key) or [] if isinstance(one, dict)]


def listed(names: Sequence[Any], most: int = 8) -> str:
    """Return names in one line: all of them, or the first ones and the last."""
    texts = [str(name) for name in names]
    return ', '.join(texts if len(texts) <= most else [*texts[: most - 1], '...', texts[-1]])
