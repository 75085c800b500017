"""What plain mm tools train on without a word: data whose classes are not those of the model or of their own file."""

from __future__ import annotations

import json
import os.path as osp
from collections.abc import Iterator, Sequence
from typing import Any

from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import DATASETS
from torch import Tensor, nn

from mmgate._environment import MM
from mmgate.errors import ConfigError
from mmgate.paths import own_model
from mmgate.registry import HOOKS

HEADS = ('auxiliary_head', 'bbox_head', 'decode_head', 'head', 'mask_head', 'query_head')
# predict something else than the data set's classes: boundaries, depth, proposals
OTHER_TARGETS = ('STDCHead', 'VPDDepthHead', 'RPNHead', 'GARPNHead', 'CascadeRPNHead', 'EmbeddingRPNHead')
LARGEST_FILE = 32 << 20  # bytes of an annotation file that is read once more, for the names of its categories


@HOOKS.register_module()
class DataCheckHook(Hook):
    """Refuses data to train on of which no class is in the annotation file; warns once where classes differ otherwise.

    Warnings are said of classes that the file lacks, of heads with another number of classes than the data, and of
    labels beyond a segmentor's classes in the first maps. Data sets and samples are looked at as they are built and
    come; nothing is read beforehand. Our command lines add the hook; ``check_data=False`` in a config leaves it out.

    Args:
        maps: How many maps of labels are looked at, of each epoch, validation or test.

    Raises:
        ConfigError: At the start of a training, with the file and the names.
    """

    priority = 'VERY_HIGH'

    def __init__(self, maps: int = 8) -> None:
        self.maps = maps
        self._left = 0
        self._said: set[str] = set()

    def before_train(self, runner: Any) -> None:
        """Look at the data sets of training and validation, so that nothing is said after an epoch alone."""
        self._look(runner, 'train')
        if runner.val_loop is not None:
            self._look(runner, 'val')

    def _before_epoch(self, runner: Any, mode: str = 'train') -> None:
        """Look at the data sets and the heads; mmengine calls this at the start of any loop."""
        self._left = self.maps
        self._look(runner, mode)

    def _look(self, runner: Any, mode: str) -> None:
        for one in innermost(getattr(runner, f'{mode}_dataloader').dataset):
            lacking, lacks_all = lacking_categories(one)
            if lacks_all and mode == 'train':
                raise ConfigError(f'train_dataloader: {lacking}')
            for found in (lacking, *other_numbers(own_model(runner.model), one)):
                self._say(runner, found, f'{mode}_dataloader: ')

    def _before_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, mode: str = 'train') -> None:
        """Look at the labels of a batch, of any loop: mmengine calls this before each of its iterations."""
        samples = data_batch.get('data_samples') if isinstance(data_batch, dict) and self._left > 0 else None
        if samples and isinstance(samples[0], Sequence):  # views of test-time augmentation, each of the whole batch
            samples = samples[0]
        for sample in samples if isinstance(samples, Sequence) else ():
            self._left -= 1
            self._say(runner, label_beyond(own_model(runner.model), sample))

    def _say(self, runner: Any, found: str, where: str = '') -> None:
        if found and found not in self._said and not runner.rank:
            self._said.add(found)
            runner.logger.warning(f'{where}{found}')


def refuse_foreign_classes(cfg: Config, runner: Any) -> None:
    """Look at a training data set that could not be built: without a box mmdet drops every image, and mmengine fails.

    Raises:
        ConfigError: No class is a category of its annotation file.
    """
    if not isinstance(runner._train_loop, dict):  # the loop is built: the error came later
        return
    for data in innermost(cfg.train_dataloader.dataset):
        dataset = DATASETS.build(dict(data, lazy_init=True))
        dataset.load_data_list()
        lacking, lacks_all = lacking_categories(dataset)
        if lacks_all:
            raise ConfigError(f'train_dataloader: {lacking}')


def innermost(dataset: Any) -> Iterator[Any]:
    """Yield the data sets, or their configs, inside wrappers such as RepeatDataset, or the data set itself."""
    inner = [getattr(dataset, 'dataset', None), *(getattr(dataset, 'datasets', None) or ())]
    found = [one for one in inner if one is not None]
    for one in found:
        yield from innermost(one)
    if not found:
        yield dataset


def lacking_categories(dataset: Any) -> tuple[str, bool]:
    """Return which of a COCO data set's classes its annotation file lacks, in words, and whether it lacks all.

    The words are empty where it lacks none, where it is not known, and where nothing is labelled.
    """
    classes, labels = _classes(dataset), _labels(dataset)
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


def other_numbers(model: nn.Module, dataset: Any) -> Iterator[str]:
    """Yield which heads predict another number of classes than the data set has."""
    meta = getattr(dataset, 'metainfo', None) or {}
    classes, things, stuff = _classes(dataset), meta.get('thing_classes'), meta.get('stuff_classes')
    kinds = {kind.__name__ for kind in type(model).__mro__}
    # text names classes anew; trackers find fewer than their data name
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
            # the list may have a name for the label that is dropped, and a threshold tells two apart
            dropped = getattr(dataset, 'reduce_zero_label', False) and predicted == len(known) - 1
            binary = getattr(head, 'out_channels', None) == 1 and len(known) <= 2
            if predicted != len(known) and not (dropped or binary or getattr(head, 'class_agnostic', False)):
                # mmdet looks up the category of a label in the file
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


def label_beyond(model: nn.Module, sample: Any) -> str:
    """Return which label of a sample's map is beyond a segmentor's classes, as its file has it; empty if none is."""
    head: Any = getattr(model, 'decode_head', None)
    head = head[-1] if isinstance(head, nn.ModuleList) else head
    classes, ignored = getattr(head, 'num_classes', None), getattr(head, 'ignore_index', 255)
    labels = getattr(getattr(sample, 'gt_sem_seg', None), 'data', None)
    if not isinstance(labels, Tensor) or not isinstance(classes, int):
        return ''
    beyond = labels[(labels >= classes) & (labels != ignored)]
    if not beyond.numel():
        return ''
    label, meta = int(beyond.max()), sample.metainfo
    return (
        f'{meta.get("seg_map_path", "a map of labels")} holds the number '
        f'{label + bool(meta.get("reduce_zero_label"))}, label {label} of the data, and the model predicts labels 0 to '
        f'{classes - 1} ({ignored} is ignored). Correct the labels, set num_classes, or set reduce_zero_label where '
        'they count from 1.'
    )


def _classes(dataset: Any) -> list[str]:
    found = (getattr(dataset, 'metainfo', None) or {}).get('classes') or ()
    return [found] if isinstance(found, str) else list(found)


def _labels(dataset: Any) -> dict[Any, int] | None:
    """Return the labels that one of the mm packages has given to a file's categories; someone's own may do without."""
    load = getattr(type(dataset), 'load_data_list', None)
    theirs = str(getattr(load, '__module__', '')).partition('.')[0] in (*MM, 'mmgate')
    return getattr(dataset, 'cat2label', None) if theirs else None


def _categories(ann_file: str) -> list[str] | None:
    """Return the names in a local COCO file of moderate size, None of another."""
    if not osp.isfile(ann_file) or osp.getsize(ann_file) > LARGEST_FILE:
        return None
    with open(ann_file, encoding='utf-8') as file:
        return [str(one.get('name')) for one in json.load(file).get('categories', ())]


def _listed(names: Sequence[str], most: int = 8) -> str:
    return ', '.join(names if len(names) <= most else [*names[: most - 1], '...', names[-1]])
