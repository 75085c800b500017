"""What is said of a COCO file whose annotations are left out, or whose classes do not fit."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mmdet.datasets import CocoDataset
from mmdet.evaluation import CocoMetric
from mmdet.evaluation.evaluator import MultiDatasetsEvaluator
from mmengine.evaluator import Evaluator
from mmengine.registry import init_default_scope

from mmgate.engine.coco_checks import check_coco_metric
from mmgate.engine.data_checks import check_dataset, check_metrics
from mmgate.engine.preflight import ConfigError

CLASSES = ('cat', 'dog')


def content() -> dict[str, Any]:
    box = dict(bbox=[1, 1, 4, 4], area=16, iscrowd=0)
    return dict(
        images=[dict(id=n, file_name=f'{n}.jpg', width=8, height=8) for n in range(3)],
        annotations=[dict(id=n, image_id=n % 3, category_id=n % 2 + 1, **box) for n in range(4)],
        categories=[dict(id=n + 1, name=name) for n, name in enumerate(CLASSES)],
    )


def changed(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> str:
    found = content()
    change(found)
    tmp_path.mkdir(exist_ok=True)
    path = tmp_path / 'a.json'
    path.write_text(json.dumps(found))
    return str(path)


def dataset(ann_file: str) -> CocoDataset:
    return CocoDataset(ann_file=ann_file, data_prefix=dict(img=''), metainfo=dict(classes=CLASSES), pipeline=[])


def other_images(found: dict[str, Any]) -> None:
    for key, entry in (('images', 'id'), ('annotations', 'image_id')):
        for one in found[key]:
            one[entry] += 10


def every_image_id_as_text(found: dict[str, Any]) -> None:
    for one in found['annotations']:
        one['image_id'] = str(one['image_id'])


@pytest.mark.parametrize(
    ('change', 'where', 'message'),
    [
        (lambda found: None, 'train_dataloader', None),
        # half of the data may be unlabelled
        (lambda found: found['annotations'].clear(), 'train_dataloader', None),
        (lambda found: [found['annotations'].clear(), found['categories'].clear()], 'train_dataloader', None),
        (
            lambda found: found['annotations'][1].update(image_id='1'),
            'val_dataloader',
            r"1 of 4 annotations .* \(image_id '1'; the images have id 0, 1, 2\), and are not used",
        ),
        (lambda found: found['images'][2].update(id=0), 'val_dataloader', '1 of 3 images .* the "id" of another one'),
        (lambda found: found['categories'][1].update(name='cow'), 'train_dataloader', 'has 1 of the 2 .* lacks dog'),
    ],
    ids=['right', 'unlabelled', 'no categories', 'a text', 'twice', 'renamed'],
)
def test_what_is_left_out_is_said(
    change: Callable[[dict[str, Any]], Any], where: str, message: str | None, tmp_path: Path
) -> None:
    data = dataset(changed(tmp_path, change))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        check_dataset(data, where, trains=True)
    said = [str(one.message) for one in caught if where in str(one.message)]
    if message is None:
        assert not said
    else:
        with pytest.warns(UserWarning, match=message):
            check_dataset(data, where, trains=True)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (every_image_id_as_text, '4 of 4 annotations .* Write image_id as the images have it'),
        (lambda found: [one.update(name='a') for one in found['categories']], 'none of the classes'),
    ],
    ids=['of no image', 'of no class'],
)
def test_no_annotation_at_all(change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path) -> None:
    """Nothing can be learned from them; what is tested may only be written."""
    data = dataset(changed(tmp_path, change))
    with pytest.raises(ConfigError, match=message):
        check_dataset(data, 'train_dataloader', trains=True)
    with pytest.warns(UserWarning, match=message):
        check_dataset(data, 'val_dataloader', trains=False)


def test_classes_without_a_comma(tmp_path: Path) -> None:
    """mmdet takes the text for a name."""
    path = changed(tmp_path, lambda found: None)
    data = CocoDataset(ann_file=path, data_prefix=dict(img=''), metainfo=dict(classes='dog'), pipeline=[])
    with pytest.warns(UserWarning, match=r"is the text 'dog'.*classes=\('dog',\)"):
        check_dataset(data, 'train_dataloader', trains=True)
    check_coco_metric(CocoMetric(ann_file=path), data, 1, 'val')


@pytest.mark.parametrize(
    ('change', 'options', 'message'),
    [
        (lambda found: None, {}, None),
        (lambda found: found['annotations'][0].pop('area'), {}, 'annotation 0 .* has no area'),
        (lambda found: None, dict(metric=['bbox', 'segm']), 'annotation 0 .* has no segmentation'),
        # of a class that is not measured
        (lambda found: [found['annotations'][0].pop('area'), found['annotations'][0].update(category_id=9)], {}, None),
        (lambda found: found['annotations'][0].pop('area'), dict(format_only=True, outfile_prefix='out'), None),
        (lambda found: found['categories'].clear(), {}, 'has 0 of the 2 classes as categories: none'),
        (other_images, {}, r'does not list 3 of the 3 images .*\(0, .*0.jpg\)'),
        (other_images, dict(format_only=True, outfile_prefix='out'), None),
    ],
    ids=['right', 'area', 'masks', 'another class', 'only written', 'categories', 'images', 'images, only written'],
)
def test_what_an_evaluation_would_stumble_over(
    change: Callable[[dict[str, Any]], Any], options: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    data = dataset(changed(tmp_path, lambda found: None))
    metric = CocoMetric(ann_file=changed(tmp_path, change), **options)
    if message is None:
        check_coco_metric(metric, data, 2, 'val')
        return
    with pytest.raises(ConfigError, match=f'val: .*{message}'):
        check_coco_metric(metric, data, 2, 'val')


def test_a_head_of_more_classes_is_warned_of(tmp_path: Path) -> None:
    path = changed(tmp_path, lambda found: None)
    with pytest.warns(UserWarning, match='predicts 80 classes, and .* has 2: cat, dog'):
        check_coco_metric(CocoMetric(ann_file=path), dataset(path), 80, 'val')
    path = changed(tmp_path, lambda found: found['categories'].pop())  # the last one: no label means another
    with pytest.warns(UserWarning, match='predicts 2 classes, and .* has 1: cat'):
        check_coco_metric(CocoMetric(ann_file=path), dataset(path), 2, 'val')


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda found: found['categories'].pop(0), 'has 1 of the 2 classes as categories: dog'),
        (lambda found: found['images'].pop(1), r'does not list 1 of the 3 images .*\(1, .*1.jpg\)'),
    ],
    ids=['category', 'image'],
)
def test_what_an_evaluation_may_stumble_over(
    change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path
) -> None:
    data = dataset(changed(tmp_path / 'all', lambda found: None))
    metric = CocoMetric(ann_file=changed(tmp_path, change))
    with pytest.warns(UserWarning, match=message):
        check_coco_metric(metric, data, 1, 'val')


def test_the_things_of_a_panoptic_data_set_are_measured_alone(tmp_path: Path) -> None:
    metric = CocoMetric(ann_file=changed(tmp_path, lambda found: None))
    meta = dict(classes=(*CLASSES, 'sky'), thing_classes=CLASSES, stuff_classes=('sky',))
    check_coco_metric(metric, SimpleNamespace(metainfo=meta), 3, 'val')


class OneClass(CocoMetric):
    """Has numbers of its own for the classes."""


class OwnFile(CocoDataset):
    def load_data_list(self) -> list[dict[str, Any]]:
        self.cat2label: dict[int, int] = {}
        return [dict(img_path='0.jpg', img_id='0.jpg', height=8, width=8, instances=[])]


class OwnLabels(CocoDataset):
    def parse_data_info(self, raw_data_info: dict[str, Any]) -> Any:
        self.cat2label = {1: 0, 2: 0}
        return super().parse_data_info(raw_data_info)


@pytest.mark.parametrize('kind', [OwnFile, OwnLabels])
def test_what_projects_read_in_their_own_way_is_theirs(kind: type[CocoDataset], tmp_path: Path) -> None:
    path = changed(tmp_path, every_image_id_as_text)
    data = kind(ann_file=path, data_prefix=dict(img=''), metainfo=dict(classes=CLASSES), pipeline=[])
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        check_dataset(data, 'train_dataloader', trains=True)
        other = SimpleNamespace(metainfo=dict(classes=CLASSES), cat2label={1: 0})
        check_dataset(other, 'train_dataloader', trains=True)
        check_coco_metric(OneClass(ann_file=path), data, 80, 'val')


def test_several_categories_may_be_one_class(tmp_path: Path) -> None:
    data = dataset(changed(tmp_path, lambda found: None))
    data.cat2label = {1: 0, 2: 0}
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        check_dataset(data, 'train_dataloader', trains=True)


def test_a_metric_for_each_data_set(tmp_path: Path) -> None:
    """As MultiDatasetsEvaluator has them."""
    init_default_scope('mmdet')
    paths = [changed(tmp_path / name, change) for name, change in (('a', lambda f: None), ('b', other_images))]
    parts = SimpleNamespace(datasets=[dataset(path) for path in paths])
    evaluator = MultiDatasetsEvaluator([dict(type='CocoMetric', ann_file=path) for path in paths], ['a', 'b'])
    check_metrics(evaluator, parts, 2, 'val')
    with pytest.raises(ConfigError, match='does not list 3 of the 3 images'):
        check_metrics(Evaluator([CocoMetric(ann_file=path) for path in paths]), parts, 2, 'val')


def test_metrics_without_a_file_pass(tmp_path: Path) -> None:
    data = dataset(changed(tmp_path, lambda found: None))
    for metric in (CocoMetric(), SimpleNamespace(_coco_api=None), object()):
        check_coco_metric(metric, data, 80, 'val')
