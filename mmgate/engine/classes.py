"""Whether the heads of a model predict the classes that its data set labels."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn

from .coco_checks import listed
from .data_checks import innermost
from .preflight import ConfigError

_HEADS = ('auxiliary_head', 'bbox_head', 'decode_head', 'head', 'mask_head', 'panoptic_head', 'query_head')
# Predict something else than the data set's classes: boundaries, depth.
_OTHER_TARGETS = ('STDCHead', 'VPDDepthHead')


def check_classes(model: nn.Module, dataset: Any, what: str = 'the training data') -> None:
    """Compare ``num_classes`` of the heads with the data set's classes; warn where a head has more.

    A data set without a list of classes is not checked, nor are heads that predict by text or without classes.

    Raises:
        ConfigError: A head has fewer classes than the data set labels; the message names it and both numbers.
    """
    meta = _labelled(model, dataset)
    if not meta:
        return
    inner = next(innermost(dataset))
    name = type(inner).__name__
    for where, setting, predicted, labelled in _counts(model, meta):
        found = f'{where} ({type(model.get_submodule(where)).__name__}) predicts {predicted} classes'
        known = f'{what} ({name}) labels {len(labelled)}: {listed(labelled, 4)}'
        if predicted >= len(labelled):
            if predicted > len(labelled):
                warnings.warn(f'{found}, but {known}. Set model.{where}.{setting}={len(labelled)}.', stacklevel=2)
        elif predicted == len(labelled) - 1 and getattr(inner, 'reduce_zero_label', False):
            # Label 0 is dropped: right if the list has a name for it, wrong if not, which the names do not tell.
            warnings.warn(f'{found}, but {known}, of which reduce_zero_label drops one if it is listed.', stacklevel=2)
        else:
            raise ConfigError(
                f'{found}, but {known}. Set model.{where}.{setting}={len(labelled)} in the config, or '
                "metainfo=dict(classes=(...)) of the data sets to the model's classes."
            )


def predicted_classes(model: nn.Module, dataset: Any) -> int:
    """Return the largest number of the data set's classes, or more, that a head predicts; 0 where none is to say."""
    meta = _labelled(model, dataset)
    return max((predicted for _, _, predicted, _ in _counts(model, meta)), default=0) if meta else 0


def _labelled(model: nn.Module, dataset: Any) -> dict[str, Any]:
    """Return a data set's ``metainfo`` if it lists classes and the model has a fixed number of them."""
    meta = getattr(dataset, 'metainfo', None) or {}
    classes = meta.get('classes')
    return {} if not classes or isinstance(classes, str) or hasattr(model, 'language_model') else meta


def _counts(model: nn.Module, meta: dict[str, Any]) -> Iterator[tuple[str, str, int, Any]]:
    """Yield name, setting, number of predicted classes and the classes to compare with, of every head."""
    things, stuff = meta.get('thing_classes'), meta.get('stuff_classes')
    for where, module in model.named_modules():
        leaf = next((part for part in reversed(where.split('.')) if not part.isdigit()), '')
        if leaf not in _HEADS or type(module).__name__ in _OTHER_TARGETS or getattr(module, 'class_agnostic', False):
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
