"""Whether the heads of a model predict the classes that its data set labels."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn

from .coco_checks import listed
from .data_checks import innermost
from .preflight import ConfigError, is_of_hosts

_HEADS = ('auxiliary_head', 'bbox_head', 'decode_head', 'head', 'mask_head', 'panoptic_head', 'query_head')
# Predict something else than the data set's classes: boundaries, depth, proposals.
_OTHER_TARGETS = ('STDCHead', 'VPDDepthHead', 'RPNHead', 'GARPNHead', 'CascadeRPNHead', 'EmbeddingRPNHead')
MOST_IMAGES = 20_000  # whose labels are looked at where there is a suspicion; a second


def check_classes(model: nn.Module, dataset: Any, *, trains: bool = True) -> None:
    """Compare ``num_classes`` of the heads with the data set's classes; warn where they differ.

    A data set without a list of classes is not checked, nor are heads that predict by text or without classes, and
    trackers, whose data name more than they find. A segmentor's maps are looked at when they are read.

    Args:
        model: The model.
        dataset: As built, in wrappers or not.
        trains: Whether it is trained on.

    Raises:
        ConfigError: Boxes or images to train on have labels beyond the classes of a head; the message names it and both
            numbers.
    """
    meta = _labelled(model, dataset)
    if not meta:
        return
    inner = next(innermost(dataset))
    what = f'the {"training data" if trains else "data to test on"} ({type(inner).__name__})'
    for where, setting, predicted, labelled in _counts(model, meta):
        found = f'{where} ({type(model.get_submodule(where)).__name__}) predicts {predicted} classes'
        known = f'{what} labels {len(labelled)}: {listed(labelled, 4)}'
        if predicted == len(labelled):
            continue
        if predicted == len(labelled) - 1 and getattr(inner, 'reduce_zero_label', False):
            # Label 0 is dropped: right if the list has a name for it, wrong if not, which the names do not tell.
            warnings.warn(f'{found}, but {known}, of which reduce_zero_label drops one if it is listed.', stacklevel=2)
            continue
        advice = f'Set model.{where}.{setting}={len(labelled)} in the config'
        if predicted < len(labelled):
            advice += ", or metainfo=dict(classes=(...)) of the data sets to the model's classes"
            if trains and setting != 'num_stuff_classes' and any(_label_beyond(predicted, dataset)):
                raise ConfigError(f'{found}, but {known}. {advice}.')
        warnings.warn(f'{found}, but {known}. {advice}, if that is not meant.', stacklevel=2)


def _label_beyond(predicted: int, dataset: Any) -> Iterator[bool]:
    """Yield of each data set whether a label of boxes or images is beyond what is predicted, as far as its list tells.

    What is labelled by maps is not listed.
    """
    for one in innermost(dataset):
        transforms = getattr(getattr(one, 'pipeline', None), 'transforms', None)
        if transforms is None or not all(is_of_hosts(type(transform)) for transform in transforms):
            continue  # one's own may change labels
        infos = (one.get_data_info(number) for number in range(min(len(one), MOST_IMAGES)))
        yield any(
            isinstance(label, int) and label >= predicted
            for info in infos
            for label in (info.get('gt_label'), *(box.get('bbox_label') for box in info.get('instances') or ()))
        )


def predicted_classes(model: nn.Module, dataset: Any) -> int:
    """Return the largest number of the data set's classes, or more, that a head predicts; 0 where none is to say."""
    meta = _labelled(model, dataset)
    return max((predicted for _, _, predicted, _ in _counts(model, meta)), default=0) if meta else 0


def _labelled(model: nn.Module, dataset: Any) -> dict[str, Any]:
    """Return a data set's ``metainfo`` if it lists classes and the model has a fixed number of them."""
    meta = getattr(dataset, 'metainfo', None) or {}
    classes = meta.get('classes')
    fixed = not hasattr(model, 'language_model') and not is_one_of(model, 'BaseMOTModel')
    return meta if fixed and classes and not isinstance(classes, str) else {}


def is_one_of(module: nn.Module, *names: str) -> bool:
    """Return whether a module's class, or one that it inherits, has one of the names."""
    return any(kind.__name__ in names for kind in type(module).__mro__)


def _counts(model: nn.Module, meta: dict[str, Any]) -> Iterator[tuple[str, str, int, Any]]:
    """Yield name, setting, number of predicted classes and the classes to compare with, of every head."""
    things, stuff = meta.get('thing_classes'), meta.get('stuff_classes')
    for where, module in model.named_modules():
        leaf = next((part for part in reversed(where.split('.')) if not part.isdigit()), '')
        if leaf not in _HEADS or is_one_of(module, *_OTHER_TARGETS) or getattr(module, 'class_agnostic', False):
            continue
        if leaf == 'panoptic_head' and hasattr(module, 'num_things_classes'):
            if things is not None and stuff is not None:
                yield where, 'num_things_classes', module.num_things_classes, things
                if module.num_stuff_classes:  # an instance segmentor may read a panoptic data set
                    yield where, 'num_stuff_classes', module.num_stuff_classes, stuff
            elif not module.num_stuff_classes:
                yield where, 'num_things_classes', module.num_things_classes, meta['classes']
            continue
        predicted = getattr(module, 'num_classes', None)
        if not isinstance(predicted, int):
            continue
        if getattr(module, 'out_channels', None) == 1 and len(meta['classes']) <= 2:
            continue  # one channel and a threshold tell two classes apart
        of_things = leaf in ('bbox_head', 'mask_head', 'query_head') and things is not None
        yield where, 'num_classes', predicted, things if of_things else meta['classes']
