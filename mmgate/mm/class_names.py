"""Warn of class names that an annotation file does not have, which would shift the labels of all classes after them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from mmengine.dist import is_main_process
from mmengine.fileio import load
from mmengine.hooks import Hook

from mmgate._environment import log


class ClassNamesHook(Hook):
    """Hook that compares the class names of COCO data sets with those in their files, before training or testing.

    mmdet's CocoDataset takes the categories whose names are in ``metainfo`` and numbers them in the order of the file,
    so that a name which the file does not have gives every class after it the label of another. It says nothing.
    """

    def before_train(self, runner: Any) -> None:
        """Compare names in the data sets of training and validation."""
        self._compare(runner.train_loop, runner.val_loop)

    def before_test(self, runner: Any) -> None:
        """Compare names in the data sets of the test."""
        self._compare(runner.test_loop)

    def _compare(self, *loops: Any) -> None:
        datasets = [getattr(getattr(loop, 'dataloader', None), 'dataset', None) for loop in loops]
        for dataset in {id(one): one for whole in datasets for one in innermost_datasets(whole)}.values():
            # A data set may be of any class; a check must not end a training.
            with suppress(Exception):
                if found := unknown_names(dataset):
                    log(found, logging.WARNING)


def innermost_datasets(dataset: Any) -> Iterator[Any]:
    """Yield the data sets inside wrappers such as ConcatDataset and RepeatDataset."""
    inside = getattr(dataset, 'datasets', None) or [getattr(dataset, 'dataset', None)]
    if inside == [None]:
        yield dataset
    else:
        for one in inside:
            yield from innermost_datasets(one)


def unknown_names(dataset: Any) -> str:
    """Return a warning of a COCO data set's class names that its file does not have, empty if there are none."""
    categories = getattr(dataset, 'cat_ids', None)
    classes = (getattr(dataset, 'metainfo', None) or {}).get('classes')
    # The file is read again only where something is wrong.
    if categories is None or classes is None or len(categories) >= len(classes) or not is_main_process():
        return ''
    content = load(dataset.ann_file, 'json', backend_args=dataset.backend_args)
    names = [one['name'] for one in content['categories']]
    missing = [name for name in classes if name not in names]
    # A name that is in metainfo twice leaves fewer categories, too.
    if not missing:
        return ''
    return (
        f'{dataset.ann_file} has no class {", ".join(missing)}: classes that come after it in metainfo get the labels '
        f'of others. metainfo.classes is {", ".join(classes)}; the file has '
        f'{", ".join(names)}. Write the names of the file.'
    )
