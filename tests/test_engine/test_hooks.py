"""What a run reports: keys loaded, files that cannot be read."""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mmcv.transforms import LoadImageFromFile
from mmdet.datasets.transforms import LoadAnnotations
from mmengine.dataset import BaseDataset, Compose
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner.checkpoint import _load_checkpoint_to_model
from PIL import Image
from torch import nn

from mmgate.engine import cli
from mmgate.engine.data_checks import check_folders
from mmgate.engine.data_errors import FileNamingCompose, try_first_map, watch_data
from mmgate.engine.hooks import LoadReportHook, load_weights
from mmgate.engine.preflight import ConfigError
from mmgate.engine.run_errors import explained_run
from mmgate.engine.safe_load import add_trust_option
from mmgate.engine.sample_checks import DataError
from mmgate.layers import PLuGMultiScaleDeformableAttention


class Renaming(nn.Linear):
    """Loads a weight by its former name, half as large."""

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *rest: Any) -> None:
        if f'{prefix}w' in state_dict:
            state_dict[f'{prefix}weight'] = state_dict.pop(f'{prefix}w').repeat(2, 1)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def report(given: dict[str, torch.Tensor], allow_mismatch: bool = False, **classes: tuple[str, ...]) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(Renaming(3, 4), nn.BatchNorm1d(4))
    lines: list[str] = []
    logger = SimpleNamespace(log=lambda level, line: lines.append(f'{logging.getLevelName(level)}: {line}'))
    runner = SimpleNamespace(model=model, logger=logger)
    hook = LoadReportHook('x.pth', allow_mismatch=allow_mismatch)
    checkpoint = dict(state_dict=given, meta=dict(dataset_meta=dict(classes=classes.get('trained'))))
    dataset = SimpleNamespace(metainfo=dict(classes=classes.get('tested')))
    runner.test_dataloader = SimpleNamespace(dataset=dataset)
    hook.after_load_checkpoint(runner, checkpoint)
    _load_checkpoint_to_model(model, checkpoint)
    hook.before_test(runner)
    return '\n'.join(lines)


LINEAR = {'0.weight': torch.zeros(4, 3), '0.bias': torch.zeros(4)}
NORM = {f'1.{name}': torch.ones(4) for name in ('weight', 'bias', 'running_mean', 'running_var')}


@pytest.mark.parametrize(
    ('given', 'line'),
    [
        (LINEAR | NORM, 'INFO: 6 of 6 keys of Sequential were loaded from x.pth, which has 6.'),
        (
            LINEAR | NORM | {'2.weight': torch.zeros(1)},
            '6 of 6 keys of Sequential were loaded from x.pth, which has 7.',
        ),
        (NORM, '4 of 6 keys of Sequential were loaded from x.pth, which has 4; not loaded: 0.weight, 0.bias.'),
        ({'0.w': torch.zeros(2, 3), '0.bias': torch.zeros(4)} | NORM, '6 of 6'),
        (LINEAR | NORM | {'0.weight': torch.zeros(4, 9)}, 'WARNING: 5 of 6 keys of Sequential were loaded'),
        (LINEAR | dict(list(NORM.items())[3:]), 'which has 3; not loaded: 1.weight, 1.bias, 1.running_mean'),
    ],
    ids=['all', 'and more', 'most', 'renamed and resized', 'of another size', 'three missing'],
)
def test_keys_are_counted(given: dict[str, torch.Tensor], line: str) -> None:
    assert line in report(given)


def test_classes_in_another_order_are_warned_of() -> None:
    lines = report(LINEAR | NORM, trained=('cat', 'dog'), tested=('dog', 'cat')).splitlines()
    assert lines[1].startswith('WARNING: x.pth was trained on the classes cat, dog, the data to test on have dog, cat')
    assert '\n' not in report(LINEAR | NORM, trained=('cat', 'dog'), tested=('cat', 'dog'))


def test_less_than_half_is_refused() -> None:
    other = {f'{key}.x': value for key, value in NORM.items()} | LINEAR
    with pytest.raises(ConfigError, match=r'2 of 6 keys.*of another model.*--allow-mismatch') as error:
        report(other)
    assert 'not loaded: 1.weight, 1.bias, 1.running_mean and 1 more' in str(error.value)
    assert '2 of 6' in report(other, allow_mismatch=True)


@pytest.mark.parametrize(
    'left_out, level', [(0, 'INFO'), (2, 'WARNING'), (3, None)], ids=['whole', 'in part', 'little']
)
def test_weights_without_a_run_are_counted_too(
    left_out: int, level: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, logged = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)), []
    monkeypatch.setattr(
        'mmgate.engine.hooks.print_log', lambda text, level, **_: logged.append((text, logging.getLevelName(level)))
    )
    given = dict(list(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)).state_dict().items())[left_out:])
    torch.save(given, path := str(tmp_path / 'weights.pth'))
    if level is None:
        with pytest.raises(ConfigError, match=r'1 of 4 keys of Sequential were loaded from .* of another model'):
            load_weights(model, path)
        return
    load_weights(model, path)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in given.items())
    ((text, said),) = logged
    assert said == level and text.startswith(f'{4 - left_out} of 4 keys of Sequential were loaded')


def test_what_is_exported_is_loaded_as_a_whole(tmp_path: Path) -> None:
    """Buffers may be missing: older checkpoints have none of a new one."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))
    path = str(tmp_path / 'weights.pth')
    for left_out, refused in (('1.running_mean', False), ('2.weight', True)):
        torch.save({key: value for key, value in model.state_dict().items() if key != left_out}, path)
        load_weights(model, path)
        if refused:
            with pytest.raises(ConfigError, match=f'not loaded: {left_out}. .*--allow-mismatch'):
                load_weights(model, path, whole=True)
        else:
            load_weights(model, path, whole=True)


def read(data: dict[str, Any]) -> dict[str, Any]:
    Image.open(data['img_path']).load()
    return data


def misread(data: dict[str, Any]) -> dict[str, Any]:
    return data['nothing']


@pytest.fixture
def images(tmp_path: Path) -> dict[str, str]:
    Image.new('RGB', (8, 8)).save(tmp_path / 'good.png')
    (tmp_path / 'cut.png').write_bytes((tmp_path / 'good.png').read_bytes()[:40])
    (tmp_path / 'empty.jpg').touch()
    return {name: str(tmp_path / name) for name in ('good.png', 'cut.png', 'empty.jpg', 'none.png')}


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('cut.png', 'no image that can be read'),
        ('empty.jpg', 'no image that can be read'),
        ('none.png', 'does not exist'),
    ],
)
def test_a_broken_file_is_named(images: dict[str, str], name: str, message: str) -> None:
    pipeline = pickle.loads(pickle.dumps(FileNamingCompose(Compose([read]))))  # as a spawned worker gets it
    assert pipeline(dict(img_path=images['good.png']))
    with pytest.raises(DataError, match=rf'img_path .*{name} .*{message}'):
        pipeline(dict(img_path=images[name], seg_map_path=images['good.png']))


def test_an_error_of_a_transform_stays_what_it_is(images: dict[str, str]) -> None:
    with pytest.raises(KeyError, match='nothing'):
        FileNamingCompose(Compose([misread]))(dict(img_path=images['good.png'], seg_map_path=images['none.png']))


class Images(torch.utils.data.Dataset):
    def __init__(self, paths: list[str]) -> None:
        self.paths, self.pipeline = paths, Compose([read])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return self.pipeline(dict(img_path=self.paths[index]))


def test_an_annotation_without_a_mask_is_named(images: dict[str, str]) -> None:
    load = LoadAnnotations(with_bbox=False, with_label=False, with_mask=True)
    pipeline = FileNamingCompose(Compose([load]))
    with pytest.raises(DataError, match='good.png: an annotation of it has no segmentation'):
        pipeline(dict(img_path=images['good.png'], ori_shape=(9, 9), instances=[dict(ignore_flag=0)]))


@pytest.mark.parametrize(('annotated', 'said'), [((8, 6), None), ((6, 8), 'is it turned'), ((8, 3), 'says 3 x 8')])
def test_an_image_of_another_size_than_annotated(annotated: tuple[int, int], said: str | None, tmp_path: Path) -> None:
    Image.new('RGB', (6, 8)).save(tmp_path / 'image.png')
    pipeline = FileNamingCompose(Compose([LoadImageFromFile()]))
    height, width = annotated
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        for _ in range(2):
            pipeline(dict(img_path=str(tmp_path / 'image.png'), height=height, width=width))
    texts = [str(one.message) for one in caught if 'its annotation says' in str(one.message)]
    assert len(texts) == (said is not None) and all(str(said) in text for text in texts)


class Frames:
    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        return dict(data, ori_shape=[(8, 8), (8, 8)], img_path=['0.jpg', '1.jpg'])


Frames.__name__ = 'LoadImageFromFile'


def test_frames_of_a_video_have_no_one_size() -> None:
    data = dict(height=[8, 8], width=[8, 8], img_path=['0.jpg', '1.jpg'])
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert FileNamingCompose(Compose([Frames()]))(data)


def asserted(data: dict[str, Any]) -> None:
    raise AssertionError('too few boxes')


@pytest.mark.parametrize(
    ('transform', 'name', 'caught', 'message'),
    [
        (read, 'none.png', FileNotFoundError, 'does not exist'),
        (read, 'cut.png', OSError, 'no image that can be read'),
        (asserted, 'good.png', AssertionError, 'too few boxes'),
    ],
)
def test_data_sets_that_skip_what_they_cannot_use_still_do(
    images: dict[str, str], transform: Any, name: str, caught: type[Exception], message: str
) -> None:
    with pytest.raises(caught, match=message) as found:
        FileNamingCompose(Compose([transform]))(dict(img_path=images[name]))
    assert isinstance(found.value, DataError) and pickle.loads(pickle.dumps(type(found.value)))


@pytest.mark.parametrize(
    ('transforms', 'options', 'missing'),
    [
        ([dict(type='LoadImageFromFile')], {}, 'img'),
        ([dict(type='LoadImageFromFile', backend_args=dict(backend='local'))], {}, None),
        ([Frames()], {}, None),  # of one's own
        ([dict(type='LoadImageFromFile')], dict(lazy_init=True), None),
        ([dict(type='mmseg.LoadAnnotations')], {}, 'maps'),
        ([dict(type='LoadAnnotations', with_bbox=True)], {}, None),
        ([], {}, None),
    ],
)
def test_folders_that_are_not_there(transforms: list[Any], options: dict, missing: str | None) -> None:
    init_default_scope('mmdet')
    prefixes = dict(img_path='nowhere/img', seg_map_path='nowhere/maps')

    class Data(BaseDataset):
        def load_data_list(self) -> list[dict[str, str]]:
            return [dict(img_path=f'{prefixes["img_path"]}/a.jpg', seg_map_path=f'{prefixes["seg_map_path"]}/a.png')]

    data = Data(pipeline=transforms, serialize_data=False, **options)
    if missing is None:
        check_folders(data, 'train_dataloader')
    else:
        with pytest.raises(ConfigError, match=f'train_dataloader: nowhere/{missing}/a.* nor does its folder'):
            check_folders(data, 'train_dataloader')


class Opens(torch.utils.data.Dataset):
    """Opens what it reads from once, as data sets of large archives do."""

    img_suffix = '.png'

    def __init__(self, error: type[Exception] | None = None) -> None:
        self.opened, self.error = False, error

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> float:
        self.opened = True
        if self.error:
            raise self.error('what is wrong')
        return np.random.rand() + float(torch.rand(1))


@pytest.mark.parametrize('error', [None, DataError, RuntimeError])
def test_the_first_map_is_read_elsewhere(error: type[Exception] | None) -> None:
    IoUMetric = type('IoUMetric', (), {})
    loader = torch.utils.data.DataLoader(Opens(error))
    loop = SimpleNamespace(dataloader=loader, evaluator=SimpleNamespace(metrics=[IoUMetric()]))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    if error is DataError:
        with pytest.raises(DataError, match='what is wrong'):
            try_first_map(loop)
    else:
        try_first_map(loop)
    assert not loader.dataset.opened and torch.equal(before, torch.get_rng_state())


OTHER = torch.optim.SGD([dict(params=[torch.ones(1)]), dict(params=[torch.ones(1)])], 0.1).state_dict()


def resumes(error: Exception) -> None:
    def resume() -> None:
        raise error

    resume()


def run_epoch() -> None:
    MODELS.build(dict(type='NoModelOfThisName'))


@pytest.mark.parametrize(
    ('command', 'kind', 'message'),
    [
        (lambda: resumes(ValueError('loaded state dict has')), ConfigError, 'groups its parameters otherwise'),
        (lambda: nn.Linear(1, 1).load_state_dict(1), TypeError, 'state_dict'),
        (lambda: torch.optim.SGD([torch.ones(1)], 0.1).load_state_dict(OTHER), ValueError, 'loaded state dict'),
        (lambda: MODELS.build(dict(type='NoModelOfThisName')), ConfigError, 'the config cannot be built: KeyError'),
        (run_epoch, KeyError, 'NoModelOfThisName'),  # too late to be the config's
        (lambda: add_trust_option(None), AttributeError, 'add_argument'),
        (lambda: PLuGMultiScaleDeformableAttention(16, 2, init='none'), ConfigError, 'MMGATE_TRACEBACK'),
    ],
    ids=['resumed', 'types', 'not resumed', 'misspelt', 'built late', 'a bug', 'an argument'],
)
def test_only_what_the_user_can_mend_loses_its_traceback(
    command: Callable[[], Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as found, explained_run():
        command()
    assert type(found.value) is kind


@pytest.mark.parametrize('workers', [0, 1])
def test_the_command_prints_one_line(
    images: dict[str, str], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.delenv('MMGATE_TRACEBACK', raising=False)

    def command(argv: list[str]) -> None:
        runner = SimpleNamespace(model=nn.Identity(), build_dataloader=torch.utils.data.DataLoader)
        watch_data(runner)
        data = torch.utils.data.ConcatDataset([Images([images['good.png'], images['cut.png']])])
        list(runner.build_dataloader(data, batch_size=1, num_workers=workers))

    assert cli.main(command, []) == 2
    error = capsys.readouterr().err
    assert error.startswith(f'error: img_path {images["cut.png"]} is no image') and error.count('\n') == 1
