"""Configs that are missing, malformed or name what is not there: what is refused, and how it is said."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
from mmdet.models import DETR
from mmengine.config import Config
from mmengine.runner import Runner

from mmgate.errors import TRUST, ConfigError
from mmgate.mm import cli, config_file
from mmgate.mm.config_file import check_checkpoint, merge_options


@pytest.mark.parametrize(
    ('kind', 'name'),
    [('AmpOptimWrapper', 'AmpOptimWrapper'), ('mmengine.AmpOptimWrapper', 'AmpOptimWrapper'), (Runner, 'Runner')],
)
def test_types_as_names_and_as_classes(kind: Any, name: str) -> None:
    """Configs in Python's style have classes."""
    assert config_file.type_name(dict(type=kind)) == name


class OwnDetector(DETR):
    """Of a user."""


@pytest.mark.parametrize(
    ('content', 'package'),
    [
        (dict(default_scope='mmseg', model=dict(type='mmdet.DETR')), 'mmseg'),
        (dict(default_scope='mmrotate', model=dict(type='R')), 'mmrotate'),
        (dict(model=dict(type='mmseg.EncoderDecoder')), 'mmseg'),
        (dict(default_scope=None, model=dict(type=OwnDetector, backbone=dict(type='mmseg.MiT'))), 'mmdet'),
        (dict(model=dict(type='mmgate.Gated', host='mmseg.EncoderDecoder')), 'mmseg'),
        (dict(model=dict(type='mmgate.Gated', host='mmdet.models.detectors.detr.DETR')), 'mmdet'),
        (dict(model=dict(type='Gated', host=DETR)), 'mmdet'),
        (dict(model=dict(type='Mine', data_preprocessor=dict(type='mmseg.SegDataPreProcessor'))), 'mmseg'),
        (dict(model=dict(type='Mine'), data_preprocessor=dict(type='mmpretrain.ClsDataPreprocessor')), 'mmpretrain'),
        (dict(model=dict(type='Mine')), None),
        (dict(), None),
    ],
)
def test_the_package_of_a_config(content: dict[str, Any], package: str | None) -> None:
    assert config_file.package_of(Config(content)) == package


@pytest.mark.parametrize(
    'content, message',
    [(None, 'does not exist'), ('model = dict(', 'cannot be read'), ('_base_ = "nope.py"', 'cannot be read')],
    ids=['missing', 'syntax', 'base'],
)
def test_a_bad_config_file_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture, content: str | None, message: str
) -> None:
    path = tmp_path / 'config.py'
    if content is not None:
        path.write_text(content)
    assert cli.main(cli.train, [str(path), '--work-dir', str(tmp_path / 'work')]) == 2
    error = capsys.readouterr().err
    assert error.startswith('error: ') and message in error
    assert not (tmp_path / 'work').exists()


@pytest.mark.parametrize('path', ['mmdet::nope/nope.py', 'nope::a.py', 'mmdet::', '::a.py'])
def test_a_packages_config_that_is_not_there_is_one_message(path: str) -> None:
    with pytest.raises(ConfigError, match=f'^config {path}'):
        config_file.read_config(path)


def test_without_mmpretrain_one_line_says_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_file, 'why_not', lambda package: f"{package}: no module named '{package}'")
    (tmp_path / 'config.py').write_text("default_scope = 'mmpretrain'")
    with pytest.raises(ConfigError, match=r"no module named 'mmpretrain'\. Type: pip install \"mmgate\[pretrain\]\""):
        config_file.read_config(str(tmp_path / 'config.py'))


@pytest.mark.parametrize(
    ('before', 'now', 'said'),
    [
        (dict(a=[dict(b=(1, 2))]), dict(a=(dict(b=[1, 2]),)), []),
        (dict(a=[dict(b='x')]), dict(a=[dict(b='y')]), ["m.a.0.b: 'x' -> 'y'"]),
        (dict(a=[1, 2]), dict(a=[1], c=None), ['m.a.1: 2 -> not set', 'm.c: not set -> None']),
        (dict(a=dict(b=1)), dict(a=3), ["m.a: {'b': 1} -> 3"]),
    ],
    ids=['the same', 'inside a list', 'more and less', 'another kind'],
)
def test_settings_that_differ_are_named(before: Any, now: Any, said: list[str]) -> None:
    assert list(config_file.differences(before, now, 'm')) == said


@pytest.mark.parametrize('key', ['neck.1.a', 'neck.first', 'hooks.0.type', 'lr.x', 'clip.norm', 'scale.0', 'neck.0'])
def test_options_that_cannot_be_merged(key: str) -> None:
    cfg = Config(dict(neck=[dict(a=1)], hooks=[], lr=0.1, clip=None, scale=(3, 4)))
    with pytest.raises(ConfigError, match=f'--cfg-options {key} cannot be merged: .'):
        merge_options(cfg, {key: 1})


def test_modules_to_import_are_given_by_imports() -> None:
    with pytest.raises(ConfigError, match=r'custom_imports=mine: it must be a dict; name modules by custom_imp'):
        merge_options(Config(), {'custom_imports': 'mine'})


def test_a_module_that_cannot_be_imported_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / 'mine_of_this_test.py').write_text('import missing_of_this_test')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="import mine_of_this_test: No module named 'missing_of_this_test'"):
        merge_options(Config(), {'custom_imports.imports': 'mine_of_this_test'})


def test_a_checkpoint_has_to_be_there(tmp_path: Path) -> None:
    there, shards = tmp_path / 'there.pth', tmp_path / 'epoch_1.pth'
    there.touch()
    shards.mkdir()
    for path in (str(there), 'https://example.org/x.pth'):
        check_checkpoint(path)
    check_checkpoint(str(shards), sharded=True)
    for path, message in ((tmp_path / 'none.pth', 'does not exist'), (shards, 'is a folder')):
        with pytest.raises(ConfigError, match=message):
            check_checkpoint(str(path))


def test_tools_take_the_users_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRUST, '')  # restored afterwards
    parser = argparse.ArgumentParser()
    config_file.add_trust_option(parser)
    parser.parse_args([])
    assert os.environ[TRUST] == ''
    parser.parse_args(['--trust-checkpoint'])
    assert os.environ[TRUST] == '1'
