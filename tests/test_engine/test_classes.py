"""Classes of the heads against classes of the data."""

from __future__ import annotations

import re
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT, skip_unless_readable
from mmdet.structures import DetDataSample, TrackDataSample
from mmengine.config import Config
from mmengine.registry import DATASETS, init_default_scope
from mmengine.structures import PixelData
from mmseg.models.decode_heads import FCNHead
from mmseg.structures import SegDataSample
from torch import nn

from mmgate.analysis.structure import build_structure
from mmgate.engine.classes import check_classes
from mmgate.engine.data_errors import label_check
from mmgate.engine.preflight import ConfigError
from mmgate.engine.sample_checks import LabelCheck, LabelWarning, MapCheck, MapSurvey, SameSizeCollate


class Head(nn.Module):
    def __init__(self, **facts: Any) -> None:
        super().__init__()
        for name, value in facts.items():
            setattr(self, name, value)


class STDCHead(Head):
    pass


class RPNHead(Head):
    pass


class BaseMOTModel(nn.Module):
    pass


def names(number: int) -> tuple[str, ...]:
    return tuple(f'c{i}' for i in range(number))


def model_of(**heads: Any) -> nn.Module:
    model = nn.Module()
    for path, head in heads.items():
        parent = model
        *outer, leaf = path.split('__')
        for part in outer:
            parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(leaf, nn.ModuleList(head) if isinstance(head, list) else head)
    return model


def data_of(number: int | None, **meta: Any) -> Any:
    return SimpleNamespace(metainfo={**({} if number is None else dict(classes=names(number))), **meta})


PANOPTIC = dict(thing_classes=names(80), stuff_classes=names(53))
CASES = {
    'detector': (model_of(bbox_head=Head(num_classes=80)), data_of(80), None),
    'detector, too few': (model_of(bbox_head=Head(num_classes=80)), data_of(81), 'model.bbox_head.num_classes=81'),
    'detector, too many': (model_of(bbox_head=Head(num_classes=80)), data_of(20), 'model.bbox_head.num_classes=20'),
    'proposals have one class': (
        model_of(rpn_head=Head(num_classes=1), roi_head__bbox_head=Head(num_classes=20)),
        data_of(20),
        None,
    ),
    'proposals alone': (model_of(bbox_head=RPNHead(num_classes=1)), data_of(80), None),  # as mmdet's RPN has them
    'cascade': (
        model_of(roi_head__bbox_head=[Head(num_classes=20), Head(num_classes=19)]),
        data_of(20),
        'model.roi_head.bbox_head.1.num_classes=20',
    ),
    'masks without classes': (model_of(mask_head=Head(num_classes=1, class_agnostic=True)), data_of(20), None),
    'no classes known': (model_of(bbox_head=Head(num_classes=8)), data_of(None), None),
    'classes by text': (
        model_of(bbox_head=Head(num_classes=2), language_model=nn.Identity()),
        data_of(20),
        None,
    ),
    'panoptic': (
        model_of(panoptic_head=Head(num_things_classes=80, num_stuff_classes=53)),
        data_of(133, **PANOPTIC),
        None,
    ),
    'panoptic, things': (
        model_of(panoptic_head=Head(num_things_classes=79, num_stuff_classes=53)),
        data_of(133, **PANOPTIC),
        'model.panoptic_head.num_things_classes=80',
    ),
    'panoptic, stuff': (
        model_of(panoptic_head=Head(num_things_classes=80, num_stuff_classes=50)),
        data_of(133, **PANOPTIC),
        'model.panoptic_head.num_stuff_classes=53',
    ),
    'instances by a panoptic head': (
        model_of(panoptic_head=Head(num_things_classes=5, num_stuff_classes=0)),
        data_of(6),
        'model.panoptic_head.num_things_classes=6',
    ),
    'boxes beside a panoptic map': (
        model_of(roi_head__bbox_head=Head(num_classes=80)),
        data_of(133, **PANOPTIC),
        None,
    ),
    'segmentor': (model_of(decode_head=Head(num_classes=150, out_channels=150)), data_of(150), None),
    'segmentor, too few': (
        model_of(decode_head=Head(num_classes=19, out_channels=19)),
        data_of(150),
        'model.decode_head.num_classes=150',
    ),
    'auxiliary heads': (
        model_of(decode_head=Head(num_classes=19), auxiliary_head=[Head(num_classes=19), Head(num_classes=2)]),
        data_of(19),
        'model.auxiliary_head.1.num_classes=19',
    ),
    'auxiliary boundaries': (
        model_of(decode_head=Head(num_classes=19), auxiliary_head=[STDCHead(num_classes=2)]),
        data_of(19),
        None,
    ),
    'two classes, one channel': (model_of(decode_head=Head(num_classes=1, out_channels=1)), data_of(2), None),
    "mmseg's Mask2Former": (  # whose numbers of things and stuff are defaults that it does not use
        model_of(decode_head=Head(num_classes=150, num_things_classes=80, num_stuff_classes=53)),
        data_of(150),
        None,
    ),
}


@pytest.mark.parametrize(('model', 'data', 'expected'), list(CASES.values()), ids=list(CASES))
def test_heads(model: nn.Module, data: Any, expected: str | None) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        check_classes(model, data)
    assert [str(w.message) for w in caught if 'predicts' not in str(w.message)] == []
    assert len(caught) == (expected is not None)
    assert all(str(expected) in str(w.message) for w in caught)


def test_a_dropped_background_may_be_listed() -> None:
    data = data_of(151)
    data.reduce_zero_label = True
    with pytest.warns(UserWarning, match='reduce_zero_label'):
        check_classes(model_of(decode_head=Head(num_classes=150)), data)


class Boxes(list):
    """Data with one box a sample."""

    metainfo = dict(classes=names(3))

    def __init__(self, labels: list[int], *transforms: Any) -> None:
        super().__init__(labels)
        self.pipeline = SimpleNamespace(transforms=transforms)

    def get_data_info(self, number: int) -> dict[str, Any]:
        return dict(instances=[dict(bbox_label=self[number])])


@pytest.mark.parametrize(
    ('labels', 'transforms', 'refused'),
    [([0, 1, 2], [], True), ([0, 1, 1], [], False), ([0, 1, 2], [SimpleNamespace()], False)],
    ids=['beyond', 'within', 'own transforms'],
)
def test_labels_beyond_the_head(labels: list[int], transforms: list[Any], refused: bool) -> None:
    """What mmdet trains is trained: names without a box, and transforms that change labels."""
    data = data_of(3)
    data.datasets = [SimpleNamespace(dataset=Boxes(labels, *transforms))]
    model = model_of(bbox_head=Head(num_classes=2))
    message = r'predicts 2 classes, but the training data \(Boxes\) labels 3: c0, c1, c2'
    if refused:
        with pytest.raises(ConfigError, match=message):
            check_classes(model, data)
    else:
        with pytest.warns(UserWarning, match=message):
            check_classes(model, data)
    with pytest.warns(UserWarning, match=r'the data to test on \(Boxes\) labels 3'):
        check_classes(model, data, trains=False)


def test_data_of_trackers_name_more_than_is_found() -> None:
    model = BaseMOTModel()
    model.add_module('detector', model_of(bbox_head=Head(num_classes=1)))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        check_classes(model, data_of(13), trains=False)


class MergingHead(FCNHead):
    """Puts labels together before its loss."""


@pytest.mark.parametrize(('kind', 'classes'), [(FCNHead, 2), (MergingHead, None)])
def test_labels_of_heads_of_the_mm_packages_alone_are_known(kind: type[FCNHead], classes: int | None) -> None:
    found = label_check(model_of(decode_head=kind(in_channels=4, channels=4, num_classes=2)))
    assert getattr(found, 'classes', None) == classes


def test_labels_to_evaluate_on_are_warned_of_once() -> None:
    check = LabelWarning(LabelCheck(6, 255))
    samples = [SegDataSample(gt_sem_seg=PixelData(data=torch.tensor([[[label]]]))) for label in (5, 255, 77, 78)]
    for sample in samples:
        sample.set_metainfo(dict(seg_map_path='map.png'))
    for sample in samples[:2]:
        check(dict(data_samples=sample))
    with pytest.warns(UserWarning, match='map.png has the label 77, but the model has 6 classes') as found:
        for sample in samples:
            check(dict(data_samples=sample))
    assert len(found) == 1


@pytest.mark.parametrize(
    ('maps', 'said'),
    [
        ([[0, 255], [1, 1]], None),
        ([[0, 0], [0, 0]], None),  # one class may be rare
        ([[255, 255], [255, 255]], 'the first 2 maps of labels have 255 alone, .*last one: map.png'),
        ([[255, 0], [0, 255]], 'have label 0 and 255 alone'),
        ([[255, 5], [5, 255]], None),  # data sorted by classes
    ],
)
def test_maps_without_anything_to_learn(maps: list[list[int]], said: str | None) -> None:
    survey = MapSurvey(255, maps=2)
    samples = [SegDataSample(gt_sem_seg=PixelData(data=torch.tensor([[labels]]))) for labels in maps]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        for sample in samples * 2:
            sample.set_metainfo(dict(seg_map_path='map.png'))
            survey(dict(data_samples=sample))
    assert len(caught) == (said is not None)
    assert all(re.search(str(said), str(one.message)) for one in caught)


def test_samples_of_other_forms_are_not_asked() -> None:
    """mmdet's maps have another name, test-time augmentation makes lists, videos have lists of everything."""
    check, survey = MapCheck(measured=True), MapSurvey(255, maps=1)
    panoptic = DetDataSample(gt_sem_seg=PixelData(sem_seg=torch.full((1, 4, 4), 255)))
    for sample in (dict(data_samples=[SegDataSample()] * 2), dict(data_samples=TrackDataSample())):
        LabelWarning(LabelCheck(6, 255))(sample)
        survey(sample)
    assert check(dict(data_samples=[SegDataSample()])) is None and check(dict(data_samples=panoptic)) is None
    assert LabelCheck(6, 255)(dict(data_samples=panoptic)) is None
    volume = SegDataSample(gt_sem_seg=PixelData(data=torch.zeros(4, 8, 8)))
    volume.set_metainfo(dict(ori_shape=(8, 8)))
    assert check(dict(inputs=torch.zeros(1, 4, 8, 8), data_samples=volume)) is None
    with pytest.warns(UserWarning, match='have 255 alone'):
        survey(dict(data_samples=panoptic))


def test_maps_of_another_size_all_at_once() -> None:
    """mmseg pads what is smaller, and trains."""
    data = SegDataSample(gt_sem_seg=PixelData(data=torch.zeros(1, 4, 6)))
    data.set_metainfo(dict(seg_map_path='map.png'))
    collate = SameSizeCollate(list, (8, 8))
    batch = [dict(inputs=torch.zeros(3, 8, 8), data_samples=data)] * 2
    with pytest.warns(UserWarning, match='map.png is a map of 6 x 4 for an image of 8 x 8') as found:
        assert collate(batch) == collate(batch) == batch
    assert len(found) == 1


CONFIGS = [path for path in sorted((ROOT / 'configs').rglob('*.py')) if not {'_base_', 'studies'} & set(path.parts)]


@pytest.mark.slow
@pytest.mark.parametrize('path', CONFIGS, ids=[path.stem for path in CONFIGS])
def test_no_config_of_ours_is_suspected(path: Any) -> None:
    skip_unless_readable(path)
    cfg = Config.fromfile(path)
    if 'train_dataloader' not in cfg:
        pytest.skip('trains nothing')
    init_default_scope(cfg.default_scope)
    if 'backbone' not in str(cfg.model.get('attention')):
        cfg.model.backbone = dict(type='ResNet', depth=18)  # heads do not look at it, and it builds in no time
    model = build_structure(cfg)
    dataset = cfg.train_dataloader.dataset
    while 'dataset' in dataset:
        dataset = dataset.dataset
    with DATASETS.switch_scope_and_registry(cfg.default_scope) as registry:
        meta = {**registry.get(dataset.type).METAINFO, **dataset.get('metainfo', {})}
    if 'classes' not in meta:
        pytest.skip("the folders of its images name its data's classes")
    with warnings.catch_warnings():
        warnings.filterwarnings('error', message='.*predicts')
        check_classes(model, SimpleNamespace(metainfo=meta))
