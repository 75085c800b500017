"""Classes of the data against those of its file and of the model."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mmdet.datasets import CocoDataset
from mmengine.config import Config
from mmengine.registry import DATASETS, init_default_scope
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample
from PIL import Image
from torch import nn

from mmgate.errors import ConfigError
from mmgate.train import data_check_hook
from mmgate.train.data_check_hook import (
    DataCheckHook,
    label_beyond,
    lacking_categories,
    other_numbers,
    refuse_foreign_classes,
)


class Head(nn.Module):
    def __init__(self, num_classes: int | None = None, **facts: Any) -> None:
        super().__init__()
        vars(self).update(facts, num_classes=num_classes)


STDCHead, RPNHead, BaseMOTModel = (type(name, (Head,), {}) for name in ('STDCHead', 'RPNHead', 'BaseMOTModel'))
SIDE_BY_SIDE = dict(num_things_classes=80, num_stuff_classes=53)


def names(number: int) -> tuple[str, ...]:
    return tuple(f'c{i}' for i in range(number))


def model_of(model: nn.Module | None = None, **heads: Any) -> nn.Module:
    """A model with heads below it, each a module or its number of classes, or a list of some."""
    model = model or nn.Module()
    for name, given in heads.items():
        several = nn.ModuleList(model_of(x=one).x for one in given) if isinstance(given, list) else None
        model.add_module(name, Head(given) if isinstance(given, int) else several or given)
    return model


def data_of(number: int | None, reduce_zero_label: bool = False, **meta: Any) -> Any:
    classes = {} if number is None else dict(classes=names(number))
    return SimpleNamespace(metainfo={**classes, **meta}, reduce_zero_label=reduce_zero_label)


PANOPTIC = data_of(133, thing_classes=names(80), stuff_classes=names(53))
# a model, data, and the setting that is named
CASES: dict[str, tuple[nn.Module, Any, str | None]] = {
    'detector': (model_of(bbox_head=80), data_of(80), None),
    'detector, too few': (model_of(bbox_head=80), data_of(81), 'bbox_head.num_classes=81'),
    'proposals have one class': (model_of(rpn_head=1, roi_head=model_of(bbox_head=20)), data_of(20), None),
    'proposals alone': (model_of(bbox_head=RPNHead(1)), data_of(80), None),  # as mmdet's RPN has them
    'cascade': (
        model_of(roi_head=model_of(bbox_head=[20, 19])),
        data_of(20),
        'roi_head.bbox_head.1.num_classes=20',
    ),
    'masks without classes': (model_of(mask_head=Head(1, class_agnostic=True)), data_of(20), None),
    'no classes known': (model_of(bbox_head=8), data_of(None), None),
    'classes by text': (model_of(bbox_head=2, language_model=nn.Identity()), data_of(20), None),
    'trackers find fewer than their data name': (model_of(BaseMOTModel(), bbox_head=1), data_of(13), None),
    'panoptic': (model_of(panoptic_head=Head(**SIDE_BY_SIDE)), PANOPTIC, None),
    'panoptic, things': (
        model_of(panoptic_head=Head(**SIDE_BY_SIDE | dict(num_things_classes=79))),
        PANOPTIC,
        'panoptic_head.num_things_classes=80',
    ),
    'boxes beside a panoptic map': (model_of(roi_head=model_of(bbox_head=80)), PANOPTIC, None),
    'auxiliary heads': (
        model_of(decode_head=19, auxiliary_head=[19, 2]),
        data_of(19),
        'auxiliary_head.1.num_classes=19',
    ),
    'auxiliary boundaries': (model_of(decode_head=19, auxiliary_head=[STDCHead(2)]), data_of(19), None),
    'a dropped background may be listed': (model_of(decode_head=150), data_of(151, reduce_zero_label=True), None),
    'two classes, one channel': (model_of(decode_head=Head(1, out_channels=1)), data_of(2), None),
    "mmseg's Mask2Former": (model_of(decode_head=Head(150, **SIDE_BY_SIDE)), data_of(150), None),  # defaults, not used
}


@pytest.mark.parametrize(('model', 'data', 'setting'), list(CASES.values()), ids=list(CASES))
def test_heads(model: nn.Module, data: Any, setting: str | None) -> None:
    found = list(other_numbers(model, data))
    assert len(found) == (setting is not None)
    assert all(f'model.{setting}' in text and 'predicts' in text for text in found)


def coco(folder: Path, classes: tuple[str, ...], *, found: tuple[str, ...] = ('cat', 'dog')) -> dict[str, Any]:
    """The config of a data set of one image with a box of each category."""
    init_default_scope('mmdet')
    content = dict(
        images=[dict(id=1, file_name='a.jpg', width=9, height=9)],
        annotations=[
            dict(id=i, image_id=1, category_id=i, bbox=[0, 0, 5, 5], area=25, iscrowd=0) for i in range(len(found))
        ],
        categories=[dict(id=i, name=name) for i, name in enumerate(found)],
    )
    (folder / 'a.json').write_text(json.dumps(content))
    files = dict(ann_file=str(folder / 'a.json'), data_prefix=dict(img=''))
    return dict(type='CocoDataset', metainfo=dict(classes=classes), pipeline=[], **files)


class Run:
    """What a hook asks of a runner."""

    def __init__(self, model: nn.Module, data: Any) -> None:
        self.model, self.rank, self.said = model, 0, []
        self.train_dataloader = self.val_dataloader = self.test_dataloader = SimpleNamespace(dataset=data)
        self.val_loop: Any = SimpleNamespace(dataloader=self.val_dataloader)
        self.logger = SimpleNamespace(warning=self.said.append)


def test_classes_that_are_no_category_are_refused(tmp_path: Path) -> None:
    """mmdet trains on images without a box, and says nothing; data sets are looked for in their wrappers."""
    data = SimpleNamespace(dataset=SimpleNamespace(datasets=[DATASETS.build(coco(tmp_path, ('person', 'car')))]))
    run, hook = Run(model_of(bbox_head=2), data), DataCheckHook()
    with pytest.raises(ConfigError, match=r'train_dataloader: none of the classes \(person, car\).*which has cat, dog'):
        hook.before_train_epoch(run)
    hook.before_val_epoch(run)
    hook.before_test_epoch(run)
    assert [text.partition(':')[0] for text in run.said] == ['val_dataloader']  # once


@pytest.mark.parametrize('where', ['here', 'large', 'elsewhere'])
def test_the_classes_of_a_large_or_remote_file_are_counted_and_not_named(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data set knows the number of its labels; names would need the file to be read again."""
    data = DATASETS.build(coco(tmp_path, ('cat', 'cow')))
    if where == 'large':
        monkeypatch.setattr(data_check_hook, 'LARGEST_FILE', Path(data.ann_file).stat().st_size - 1)
    if where == 'elsewhere':
        Path(data.ann_file).unlink()
    found, lacks_all = lacking_categories(data)
    assert 'a.json has 1 of the 2 classes as categories' in found and not lacks_all
    assert ('it lacks cow' in found) == (where == 'here')


@pytest.mark.parametrize('validates', [True, False])
def test_what_the_validation_will_meet_is_said_at_the_start(tmp_path: Path, validates: bool) -> None:
    """Its evaluation looks up the category of each label, and comes after an epoch."""
    train = coco(tmp_path, ('cat', 'dog', 'cow'), found=('cat', 'dog', 'cow'))
    run, hook = Run(model_of(bbox_head=3), DATASETS.build(train)), DataCheckHook()
    run.val_dataloader = SimpleNamespace(dataset=DATASETS.build(coco(tmp_path, ('cat', 'dog', 'cow'))))
    run.val_loop = SimpleNamespace(dataloader=run.val_dataloader) if validates else None
    hook.before_train(run)
    assert len(run.said) == validates
    assert all('val_dataloader: ' in text and 'it lacks cow' in text and 'IndexError' in text for text in run.said)
    hook.before_train_epoch(run)
    hook.before_val_epoch(run)
    assert len(run.said) == 1


@pytest.mark.parametrize(('predicted', 'ends'), [(80, True), (1, False)], ids=['more', 'fewer'])
def test_more_classes_than_the_file_end_the_evaluation(tmp_path: Path, predicted: int, ends: bool) -> None:
    data = DATASETS.build(coco(tmp_path, ('cat', 'dog')))
    (found,) = other_numbers(model_of(bbox_head=predicted), data)
    assert f'predicts {predicted} classes' in found and ('IndexError at a prediction beyond' in found) == ends


def test_a_data_set_of_ones_own_may_read_its_file_otherwise(tmp_path: Path) -> None:
    class Own(CocoDataset):
        def load_data_list(self) -> list[dict[str, Any]]:
            self.cat2label: dict[int, int] = {}
            return []

    data = DATASETS.build(coco(tmp_path, ('own',)) | dict(type=Own, lazy_init=True))
    data.load_data_list()
    DataCheckHook().before_train_epoch(Run(model_of(bbox_head=1), data))


@pytest.mark.parametrize(
    ('classes', 'found', 'said'),
    [
        (('cat', 'dog'), ('cat', 'dog'), None),
        (('cat',), (), None),  # as the unlabelled part of a semi-supervised training
        (('cat', 'dog', 'cow'), ('cat', 'dog'), 'has 2 of the 3 classes as categories; it lacks cow.'),
    ],
    ids=['all', 'no labels', 'one lacks'],
)
def test_what_is_said_once(classes: tuple[str, ...], found: tuple[str, ...], said: str | None, tmp_path: Path) -> None:
    run = Run(model_of(bbox_head=len(classes)), DATASETS.build(coco(tmp_path, classes, found=found)))
    hook = DataCheckHook()
    for _ in range(2):
        hook.before_train_epoch(run)
    assert len(run.said) == (said is not None) and all(str(said) in text for text in run.said)


@pytest.mark.parametrize(('classes', 'refused'), [(('person',), True), (('cat',), False)], ids=['foreign', 'known'])
@pytest.mark.parametrize('wrapped', [False, True], ids=['bare', 'wrapped'])
def test_a_data_set_that_was_never_built(
    classes: tuple[str, ...], refused: bool, wrapped: bool, tmp_path: Path
) -> None:
    """Where images without a box are filtered, mmengine fails at an empty list before a hook is called."""
    data = dict(coco(tmp_path, classes), filter_cfg=dict(filter_empty_gt=True))
    if wrapped:
        data = dict(type='RepeatDataset', times=2, dataset=dict(type='ConcatDataset', datasets=[data, data]))
    with pytest.raises(ValueError, match='need at least one array') if refused else nullcontext():
        DATASETS.build(data)
    cfg = Config(dict(train_dataloader=dict(dataset=data)))
    with pytest.raises(ConfigError, match='none of the classes') if refused else nullcontext():
        refuse_foreign_classes(cfg, SimpleNamespace(_train_loop=dict()))
    refuse_foreign_classes(cfg, SimpleNamespace(_train_loop=object()))  # built: the error is another


def sample(labels: list[int], **meta: Any) -> SegDataSample:
    data = torch.tensor(labels)[None, None]
    return SegDataSample(gt_sem_seg=PixelData(data=data), metainfo=dict(seg_map_path='maps/a.png', **meta))


SEGMENTOR = model_of(decode_head=Head(3, ignore_index=255))


@pytest.mark.parametrize(
    ('labels', 'meta', 'said'),
    [
        ([0, 1, 2, 255], {}, ''),
        ([0, 3], {}, 'maps/a.png holds the number 3, label 3 of the data'),
        ([0, 3], dict(reduce_zero_label=True), 'maps/a.png holds the number 4, label 3 of the data'),
    ],
    ids=['within', 'beyond', 'as it stands in the file'],
)
def test_labels_of_maps(labels: list[int], meta: dict[str, Any], said: str) -> None:
    found = label_beyond(SEGMENTOR, sample(labels, **meta))
    assert found.startswith(said) and bool(found) == bool(said)


def test_the_first_maps_are_looked_at() -> None:
    run, hook = Run(SEGMENTOR, data_of(3)), DataCheckHook(maps=3)
    hook.before_train_epoch(run)
    batches = [[sample([0]), sample([1])], [sample([2]), sample([7])], [sample([9])]]
    for number, batch in enumerate(batches):
        hook.before_train_iter(run, number, dict(data_samples=batch))
    assert len(run.said) == 1 and 'holds the number 7' in run.said[0]


def test_maps_of_test_time_augmentation() -> None:
    """Each view is a list of the whole batch."""
    run, hook = Run(nn.ModuleDict(dict(data_preprocessor=nn.Identity(), module=SEGMENTOR)), data_of(3)), DataCheckHook()
    hook.before_test_epoch(run)
    hook.before_test_iter(run, 0, dict(data_samples=[[sample([0]), sample([7])]] * 2))
    assert len(run.said) == 1 and 'holds the number 7' in run.said[0]


def test_the_number_of_a_file_is_the_one_that_stands_in_it(tmp_path: Path) -> None:
    """Through mmseg's own pipeline."""
    from mmseg.datasets import BaseSegDataset

    init_default_scope('mmseg')
    for folder, suffix, values in (('img', '.jpg', (8, 8, 3)), ('map', '.png', (8, 8))):
        (tmp_path / folder).mkdir()
        Image.fromarray(np.full(values, 9, np.uint8)).save(tmp_path / folder / f'a{suffix}')
    loads = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', reduce_zero_label=True)]
    data = BaseSegDataset(
        data_prefix=dict(img_path=str(tmp_path / 'img'), seg_map_path=str(tmp_path / 'map')),
        metainfo=dict(classes=('a', 'b', 'c')),
        reduce_zero_label=True,
        pipeline=[*loads, dict(type='PackSegInputs')],
    )
    assert 'a.png holds the number 9, label 8 of the data' in label_beyond(SEGMENTOR, data[0]['data_samples'])
