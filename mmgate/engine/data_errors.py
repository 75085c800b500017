"""What is wrong with the data of a run, said by file: while data sets are built, and when a sample is met.

Nothing is decoded beforehand but one image with its map of labels: a start costs the same for ten images and for a
million.
"""

from __future__ import annotations

import json
import multiprocessing
import os.path as osp
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from mmengine.dataset import Compose
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Subset

from .data_checks import check_dataset, check_names, innermost, lacks, wrapped
from .gate_hooks import own_model
from .preflight import ConfigError, is_of_hosts, type_name
from .run_errors import raised_at
from .sample_checks import (
    DataError,
    Found,
    LabelCheck,
    LabelWarning,
    MapCheck,
    MapSurvey,
    SameSizeCollate,
    data_error_like,
)

_IMAGES = ('.jpg', '.jpeg', '.png', '.bmp', '.webp')
_BY_INDEX = ('CrossEntropyLoss', 'LabelSmoothLoss')  # read a label as an index, unless they are of sigmoids
# of a transform's code, not of data
_BUGS = (AttributeError, ImportError, KeyError, NameError, NotImplementedError, TypeError)


class FileNamingCompose(Compose):
    """A data set's pipeline that raises :class:`DataError` with the file's name where a sample cannot be used.

    Warns once of an image of another size than its annotation says.

    Args:
        pipeline: The pipeline, whose transforms are shared.
        *checks: Called with what the pipeline returns; return the key of the file to blame and why, or None.
    """

    def __init__(self, pipeline: Compose, *checks: Callable[[dict[str, Any]], Found]):
        self.transforms, self.checks = pipeline.transforms, checks
        self._warned = False

    def __call__(self, data: dict[str, Any]) -> dict[str, Any] | None:
        """Apply the transforms; an error of their own code stays as it is."""
        files = {key: value for key, value in data.items() if key.endswith('_path') and isinstance(value, str)}
        sample: Any = data
        annotated = data.get('height'), data.get('width')
        for transform in self.transforms:
            try:
                sample = transform(sample)
            except Exception as error:
                kind = data_error_like(error)
                for key, path in files.items():
                    reason = unreadable(path, error)
                    if reason:
                        raise kind(f'{key} {path} {reason}.') from error
                key, path = next(iter(files.items()), ('', ''))
                if path and isinstance(error, KeyError) and error.args == ('mask',):  # mmdet's name for it
                    raise DataError(
                        f'{key} {path}: an annotation of it has no segmentation, which the masks are made of '
                        '(LoadAnnotations.with_mask). Give it one, or train a model of boxes.'
                    ) from error
                if not files or isinstance(error, _BUGS):
                    raise
                raise kind(
                    f'{key} {path}: {type(transform).__name__} cannot take it or its annotation: '
                    f'{type(error).__name__}: {error} ({raised_at(error)})'
                ) from error
            if sample is None:
                return None
            if type(transform).__name__ == 'LoadImageFromFile':  # others may scale images and boxes
                self._warn_of_size(annotated, sample)
        for check in self.checks if isinstance(sample, dict) else ():
            blamed = check(sample)
            if blamed:
                key, reason = blamed
                raise DataError(f'{key} {files.get(key, "")} {reason}')
        return sample

    def _warn_of_size(self, annotated: tuple[Any, Any], sample: dict[str, Any]) -> None:
        size = tuple(sample.get('ori_shape') or ())[:2]
        known = len(size) == 2 and all(isinstance(side, int) for side in (*annotated, *size))  # not of a video
        if self._warned or not known or size == annotated:
            return
        height, width = size
        self._warned = True
        turned = ' (is it turned by its EXIF?)' if annotated == (width, height) else ''
        warnings.warn(
            f'img_path {sample.get("img_path", "")} has {width} x {height} pixels, its annotation says '
            f'{annotated[1]} x {annotated[0]}{turned}. Boxes may not fit, and a CocoDataset drops those beyond the '
            'annotated size. Correct the width and height of the image in the file.',
            stacklevel=2,
        )


def watch_data(runner: Any) -> None:
    """Make every data loader that ``runner`` is going to build check its data set, and name the files at fault."""
    build = runner.build_dataloader

    def build_dataloader(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        given = {split: getattr(runner, f'_{split}_dataloader', None) for split in ('train', 'val', 'test')}
        # the very one first: a config may evaluate on the data that it trains on
        alike = [name for name, value in given.items() if value is not None and value == dataloader]
        split = next((name for name in alike if given[name] is dataloader), next(iter(alike), ''))
        where = f'{split}_dataloader' if split else 'a data loader'
        try:
            loader = build(dataloader, *args, **kwargs)
        except ConfigError:
            raise
        except Exception as error:
            explained = _explain(error, where)
            if explained is None:
                raise
            raise ConfigError(f'{where}: {explained}.') from error
        trains = split == 'train'
        check_dataset(loader.dataset, where, trains=trains)
        _replace_pipelines(loader.dataset, *_checks(runner, split, loader))
        if trains and callable(getattr(loader, 'collate_fn', None)):
            loader.collate_fn = SameSizeCollate(loader.collate_fn, _padded_to(runner.model))
        return loader

    runner.build_dataloader = build_dataloader  # an iteration-based loop starts its workers when it is built


def _checks(runner: Any, split: str, loader: Any) -> list[Callable[[dict[str, Any]], Found]]:
    """Return what samples of a split are asked."""
    trains, labels = split == 'train', label_check(runner.model)
    evaluators = None if trains else getattr(runner, f'_{split}_evaluator', None)
    judges = [
        one
        for one in (evaluators if isinstance(evaluators, list) else [evaluators])
        if isinstance(one, Mapping) and not one.get('format_only')
    ]
    # a model may bring results of its own to the size of its own maps
    own = not is_of_hosts(getattr(type(own_model(runner.model)), 'postprocess_result', None))
    measured = not own and any(type_name(one) == 'IoUMetric' for one in judges)
    checks: list[Callable[[dict[str, Any]], Found]] = []
    if measured or (trains and labels is not None):
        checks.append(MapCheck(measured))
    if labels is not None and (trains or judges):
        checks.append(labels if trains else LabelWarning(labels))
        if labels.ignored is not None and labels.classes > 1 and hasattr(loader.dataset, '__len__'):
            seen = len(loader.dataset) // max(getattr(loader, 'num_workers', 0), 1)  # by each worker
            checks.append(MapSurvey(labels.ignored, min(max(seen, 1), 8)))
    return checks


def try_first_map(loop: Any) -> None:
    """Read the first sample of a loop that measures mIoU, in another process: what is wrong would show too late.

    Files that a data set opens, and random numbers, stay those of its own workers.
    """
    data, context = loop.dataloader.dataset, loop.dataloader.multiprocessing_context
    forks = (context or multiprocessing).get_start_method() == 'fork'
    measures = any(type(metric).__name__ == 'IoUMetric' for metric in loop.evaluator.metrics)
    if forks and measures and all(hasattr(one, 'img_suffix') for one in innermost(data)):
        loader = DataLoader(
            Subset(data, [0]), None, num_workers=1, multiprocessing_context='fork', generator=torch.Generator()
        )
        try:
            next(iter(loader))
        except ConfigError:
            raise
        except Exception:  # the evaluation itself shows it better
            return


def label_check(model: Any) -> LabelCheck | None:
    """Return what labels of a segmentor or a classifier have to be, None where any label can be trained."""
    model = own_model(model)
    head = getattr(model, 'decode_head', None) or getattr(model, 'head', None)
    head = head[-1] if isinstance(head, nn.ModuleList) else head
    classes = getattr(head, 'num_classes', None)
    if not is_of_hosts(type(head)) or not isinstance(head, nn.Module) or not isinstance(classes, int):
        return None  # a head of one's own may put labels together
    of_classes = [
        m for name in ('loss_cls', 'loss_decode', 'loss_module') if (m := getattr(head, name, None)) is not None
    ]
    losses = [m for one in of_classes for m in one.modules() if type(m).__name__ in _BY_INDEX]
    if not losses or any(getattr(loss, 'use_sigmoid', False) for loss in losses):
        return None  # by sigmoids a label beyond the classes means none of them
    return LabelCheck(classes, getattr(head, 'ignore_index', None))


def _padded_to(model: Any) -> tuple[int, int] | None:
    preprocessor = getattr(own_model(model), 'data_preprocessor', None)
    size = getattr(preprocessor, 'size', None)
    return (int(size[-2]), int(size[-1])) if type(preprocessor).__name__ == 'SegDataPreProcessor' and size else None


def _replace_pipelines(dataset: Any, *checks: Callable[[dict[str, Any]], Found]) -> None:
    if type(getattr(dataset, 'pipeline', None)) is Compose:
        dataset.pipeline = FileNamingCompose(dataset.pipeline, *checks)
    for inner in wrapped(dataset):
        _replace_pipelines(inner, *checks)


def _explain(error: BaseException, where: str) -> str | None:
    """Return what a data set stumbled over while it read its annotations; None if that is not what it did.

    Raises:
        ConfigError: Its classes are what is wrong.
    """
    frames = list(_frames(error))
    dataset = next((f.f_locals.get('self') for f in frames if f.f_code.co_name == 'full_init'), None)
    if dataset is None:
        return None
    name, place = type(dataset).__name__, _place(dataset)
    if any(frame.f_code.co_name == '_serialize_data' for frame in frames):
        check_names(dataset, where, needed=True)
        return lacks(dataset)
    if isinstance(error, json.JSONDecodeError):
        return f'{place} is no whole JSON file ({error}); copy or write it again'
    annotation: dict[str, Any] = next(
        (f.f_locals['ann'] for f in reversed(frames) if isinstance(f.f_locals.get('ann'), dict)), {}
    )
    which = f' (annotation {annotation["id"]})' if 'id' in annotation else ''
    reason = f'key {error} is missing' if isinstance(error, KeyError) else f'{type(error).__name__}: {error}'
    return f'{name} cannot read {place}{which}: {reason}'


def _frames(error: BaseException) -> Iterator[FrameType]:
    """Yield the frames that an error passed, then those of the error that it replaced."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next
    if error.__context__ is not None:
        yield from _frames(error.__context__)


def _place(dataset: Any) -> str:
    prefixes = getattr(dataset, 'data_prefix', None)
    folders = [str(value) for value in prefixes.values() if value] if isinstance(prefixes, dict) else []
    ann_file = getattr(dataset, 'ann_file', '')
    return str(ann_file) if ann_file and not osp.isdir(ann_file) else ', '.join(folders) or 'its folder'


def unreadable(path: str, error: Exception) -> str | None:
    """Return why ``path``, at which ``error`` was raised, is broken; None if it is sound or cannot be told."""
    if not osp.isfile(path):
        return 'does not exist' if isinstance(error, FileNotFoundError) and '://' not in path else None
    if not path.lower().endswith(_IMAGES):
        return None
    try:
        with Image.open(path) as image:
            image.load()
            width, height = image.size
    except Exception as broken:
        return f'is no image that can be read ({type(broken).__name__}); replace it or take it out'
    return f'has {width} x {height} pixels, too few for the pipeline; take it out' if 1 in (width, height) else None
