"""Class names that an annotation file does not have are named before a training or a test."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mmdet.datasets import CocoDataset
from mmengine.dataset import ConcatDataset, RepeatDataset

from mmgate.mm import class_names
from mmgate.mm.class_names import ClassNamesHook


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(class_names, 'log', lambda text, level: lines.append(text))
    return lines


def dataset(folder: Path, *classes: str) -> CocoDataset:
    """Return a data set of a file with three classes, by the names of a config."""
    categories = [dict(id=10 * number, name=name) for number, name in enumerate(('ring', 'star', 'cross'))]
    boxes = [dict(id=n, image_id=0, category_id=10 * n, bbox=[0, 0, 5, 5], area=25, iscrowd=0) for n in range(3)]
    images = [dict(id=0, file_name='a.png', height=9, width=9)]
    (folder / 'a.json').write_text(json.dumps(dict(images=images, annotations=boxes, categories=categories)))
    file, prefix = str(folder / 'a.json'), dict(img='')
    return CocoDataset(ann_file=file, data_prefix=prefix, metainfo=dict(classes=classes), pipeline=[])


def loop(data: Any) -> Any:
    return SimpleNamespace(dataloader=SimpleNamespace(dataset=data))


def test_a_name_that_the_file_does_not_have_is_named(tmp_path: Path, said: list[str]) -> None:
    wrong = dataset(tmp_path, 'ring', 'stra', 'cross')
    assert [box['bbox_label'] for box in wrong.get_data_info(0)['instances']] == [0, 1]  # a cross is a "stra"
    several, repeated = ConcatDataset([wrong, wrong]), RepeatDataset(wrong, 2)
    ClassNamesHook().before_train(SimpleNamespace(train_loop=loop(several), val_loop=loop(repeated)))
    (line,) = said
    assert 'a.json has no class stra' in line
    assert 'metainfo.classes is ring, stra, cross; the file has ring, star, cross' in line
    ClassNamesHook().before_test(SimpleNamespace(test_loop=loop(wrong)))
    assert len(said) == 2


def test_names_of_the_file_are_no_matter(tmp_path: Path, said: list[str]) -> None:
    """Nor are fewer of them, data of another kind, and what cannot be looked at."""
    broken = SimpleNamespace(cat_ids=[1], metainfo=dict(classes=('a', 'b')), ann_file='absent.json')
    for data in (
        dataset(tmp_path, 'ring', 'star', 'cross'),
        dataset(tmp_path, 'star'),
        dataset(tmp_path, 'ring', 'ring'),
        [1, 2],
        None,
        broken,
    ):
        ClassNamesHook().before_test(SimpleNamespace(test_loop=loop(data)))
        ClassNamesHook().before_train(SimpleNamespace(train_loop=loop(data), val_loop=None))
    assert not said
