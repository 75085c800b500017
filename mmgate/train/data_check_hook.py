"""Check that the classes of data sets, annotation files and model agree, since mm packages accept any."""

from __future__ import annotations

import json
import os.path as osp
from collections.abc import Iterator, Sequence
from typing import Any

from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.hooks.hook import DATA_BATCH
from mmengine.registry import DATASETS
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement
from torch import Tensor, nn

from mmgate._environment import MM
from mmgate.errors import ConfigError
from mmgate.registry import HOOKS
from mmgate.wrappers import unwrap_model

HEADS = ('auxiliary_head', 'bbox_head', 'decode_head', 'head', 'mask_head', 'query_head')
# Heads that predict something else than the data set's classes: boundaries, depth, proposals.
OTHER_TARGETS = ('STDCHead', 'VPDDepthHead', 'RPNHead', 'GARPNHead', 'CascadeRPNHead', 'EmbeddingRPNHead')
LARGEST_FILE = 32 << 20  # bytes up to which an annotation file is read again, for the names of its categories


@HOOKS.register_module()
class DataCheckHook(Hook):
    """Hook that stops a training on data without any of its classes, and warns of other mistakes in classes.

    It warns of classes that the file lacks, of heads with another number of classes than the data, and of labels
    beyond a segmentor's classes in the first maps. It checks data sets after they are built and samples in their
    batches, and reads no data for it. Our command lines add the hook; ``check_data=False`` in a config leaves it out.

    Args:
        maps: Number of label maps that are checked in each epoch, validation or test.

    Raises:
        ConfigError: No class of the training data is in the file; the message has the file and the names.
    """

    priority = 'VERY_HIGH'

    def __init__(self, maps: int = 8) -> None:
        self.maps = maps
        self._left = 0
        self._logged: set[str] = set()

    def before_train(self, runner: Runner) -> None:
        """Check the data sets of training and validation before the first step."""
        self._check(runner, 'train')
        if runner.val_loop is not None:
            self._check(runner, 'val')

    def _before_epoch(self, runner: Runner, mode: str = 'train') -> None:
        """Check the data sets and the model's heads; mmengine calls this at the start of each epoch of any loop."""
        self._left = self.maps
        self._check(runner, mode)

    def _check(self, runner: Runner, mode: str) -> None:
        for one in innermost(getattr(runner, f'{mode}_dataloader').dataset):
            lacking, lacks_all = lacking_categories(one)
            if lacks_all and mode == 'train':
                raise ConfigError(f'train_dataloader: {lacking}')
            for found in (lacking, *other_numbers(unwrap_model(runner.model), one)):
                self._warn(runner, found, f'{mode}_dataloader: ')

    def _before_iter(self, runner: Runner, batch_idx: int, data_batch: DATA_BATCH = None, mode: str = 'train') -> None:
        """Check the labels of the first batches; mmengine calls this before each iteration of any loop."""
        samples = data_batch.get('data_samples') if isinstance(data_batch, dict) and self._left > 0 else None
        # Test-time augmentation gives several views of the whole batch.
        if samples and isinstance(samples[0], Sequence):
            samples = samples[0]
        for sample in samples if isinstance(samples, Sequence) else ():
            self._left -= 1
            self._warn(runner, label_beyond(unwrap_model(runner.model), sample))

    def _warn(self, runner: Runner, found: str, where: str = '') -> None:
        if found and found not in self._logged and not runner.rank:
            self._logged.add(found)
            runner.logger.warning(f'{where}{found}')


def refuse_foreign_classes(cfg: Config, runner: Runner) -> None:
    """Raise ConfigError if a training data set could not be built because none of its classes is in its file.

    If no class is in the file, mmdet finds no box and drops every image, and mmengine fails with another message.

    Raises:
        ConfigError: No class is a category of its annotation file.
    """
    if not isinstance(runner._train_loop, dict):  # the loop was built, so the error has another cause
        return
    for data in innermost(cfg.train_dataloader.dataset):
        dataset = DATASETS.build(dict(data, lazy_init=True))
        dataset.load_data_list()
        lacking, lacks_all = lacking_categories(dataset)
        if lacks_all:
            raise ConfigError(f'train_dataloader: {lacking}')


def innermost(dataset: Any) -> Iterator[Any]:
    """Yield the data sets (or their configs) inside wrappers such as RepeatDataset; else the data set itself."""
    inner = [getattr(dataset, 'dataset', None), *(getattr(dataset, 'datasets', None) or ())]
    found = [one for one in inner if one is not None]
    for one in found:
        yield from innermost(one)
    if not found:
        yield dataset


def lacking_categories(dataset: Any) -> tuple[str, bool]:
    """Return a message on classes that are missing in a COCO annotation file, and True if all are missing.

    The message is empty where it lacks none, where that is unknown, and where nothing is labelled.
    """
    classes = _classes(dataset)
    labels = _labels(dataset)
    if labels is None or len(labels) >= len(classes):
        return '', False
    names = _categories(str(dataset.ann_file))
    if not labels:
        there = f', which has {_listed(names)}' if names else ''
        found = (
            f'none of the classes ({_listed(classes)}) is a category of {dataset.ann_file}{there}. Set '
            'metainfo=dict(classes=(...)) to the names in the file, spelt as there.'
        )
        return ('', False) if names == [] else (found, True)
    lacking = [name for name in classes if name not in (names or classes)]
    return (
        f'{dataset.ann_file} has {len(labels)} of the {len(classes)} classes as categories'
        + (f'; it lacks {_listed(lacking)}' if lacking else '')
        + '. mmdet numbers those that are there, in the order of the file, and its evaluation ends with an IndexError '
        'where a head predicts more.'
    ), False


def other_numbers(model: nn.Module, dataset: object) -> Iterator[str]:
    """Yield a message for each head of the model whose number of classes differs from the data set's."""
    meta = getattr(dataset, 'metainfo', None) or {}
    classes = _classes(dataset)
    things = meta.get('thing_classes')
    stuff = meta.get('stuff_classes')
    kinds = {kind.__name__ for kind in type(model).__mro__}
    # With a language model a text names the classes, and trackers find fewer classes than their data have.
    if not classes or hasattr(model, 'language_model') or 'BaseMOTModel' in kinds:
        return
    for name, head in model.named_modules():
        leaf = next((part for part in reversed(name.split('.')) if not part.isdigit()), '')
        counted: dict[str, Any] = {}
        if leaf == 'panoptic_head' and things and stuff:
            counted = dict(num_things_classes=things, num_stuff_classes=stuff)
        elif leaf in HEADS and not things and type(head).__name__ not in OTHER_TARGETS:
            counted = dict(num_classes=classes)
        for setting, known in counted.items():
            predicted = getattr(head, setting, None)
            if not isinstance(predicted, int):
                continue
            # The list may name the label that is dropped, and one output with a threshold can tell two classes apart.
            dropped = getattr(dataset, 'reduce_zero_label', False) and predicted == len(known) - 1
            binary = getattr(head, 'out_channels', None) == 1 and len(known) <= 2
            if predicted != len(known) and not (dropped or binary or getattr(head, 'class_agnostic', False)):
                # mmdet's evaluation looks up the category of a label in the file.
                ends = predicted > len(known) and _labels(dataset) is not None
                yield (
                    f'{name} ({type(head).__name__}) predicts {predicted} classes, and {type(dataset).__name__} has '
                    f'{len(known)}: {_listed(known)}. Set model.{name}.{setting}={len(known)}, or '
                    'metainfo=dict(classes=(...)) of the data'
                    + (
                        ': the evaluation ends with an IndexError at a prediction beyond.'
                        if ends
                        else ', if not meant.'
                    )
                )


def label_beyond(model: nn.Module, sample: BaseDataElement) -> str:
    """Return a message if a sample's label map has a class number beyond the segmentor's classes, else ''."""
    head: Any = getattr(model, 'decode_head', None)
    head = head[-1] if isinstance(head, nn.ModuleList) else head
    classes = getattr(head, 'num_classes', None)
    ignored = getattr(head, 'ignore_index', 255)
    labels = getattr(getattr(sample, 'gt_sem_seg', None), 'data', None)
    if not isinstance(labels, Tensor) or not isinstance(classes, int):
        return ''
    beyond = labels[(labels >= classes) & (labels != ignored)]
    if not beyond.numel():
        return ''
    label = int(beyond.max())
    meta = sample.metainfo
    return (
        f'{meta.get("seg_map_path", "a map of labels")} holds the number '
        f'{label + bool(meta.get("reduce_zero_label"))}, label {label} of the data, and the model predicts labels 0 to '
        f'{classes - 1} ({ignored} is ignored). Correct the labels, set num_classes, or set reduce_zero_label where '
        'they count from 1.'
    )


def _classes(dataset: object) -> list[str]:
    found = (getattr(dataset, 'metainfo', None) or {}).get('classes') or ()
    return [found] if isinstance(found, str) else list(found)


def _labels(dataset: object) -> dict[Any, int] | None:
    """Return the label that a data set of the mm packages gives each category of its file; None for other sets."""
    load = getattr(type(dataset), 'load_data_list', None)
    theirs = str(getattr(load, '__module__', '')).partition('.')[0] in (*MM, 'mmgate')
    return getattr(dataset, 'cat2label', None) if theirs else None


def _categories(ann_file: str) -> list[str] | None:
    """Return the category names in a local COCO file, or None if the file is large or remote."""
    if not osp.isfile(ann_file) or osp.getsize(ann_file) > LARGEST_FILE:
        return None
    with open(ann_file, encoding='utf-8') as file:
        return [str(one.get('name')) for one in json.load(file).get('categories', ())]


def _listed(names: Sequence[str], most: int = 8) -> str:
    return ', '.join(names if len(names) <= most else [*names[: most - 1], '...', names[-1]])
