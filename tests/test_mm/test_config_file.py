"""Configs that are missing, malformed or name what is not there: what is refused, and how it is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mmdet.models import DETR
from mmengine.config import Config

from mmgate.errors import ConfigError
from mmgate.mm import cli, config_file
from mmgate.mm.config_file import check_checkpoint, merge_options


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
    ('path', 'content', 'message'),
    [
        ('config.py', None, 'FileNotFoundError'),
        ('config.py', 'model = dict(', 'SyntaxError'),
        ('config.py', '_base_ = "nope.py"', 'nope.py'),
        ('config.py', "default_scope = 'mmpretrain'", r"named 'mmpretrain'\. Type: pip install \"mmgate\[pretrain\]\""),
        *[(path, None, 'cannot be read') for path in ('mmdet::nope/nope.py', 'nope::a.py', 'mmdet::', '::a.py')],
    ],
)
def test_a_config_that_cannot_be_read_is_one_message(
    path: str,
    content: str | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config_file, 'why_not', lambda package: f"{package}: no module named '{package}'")
    if content is not None:
        Path(path).write_text(content)
    with pytest.raises(ConfigError, match=f'^config {path}: .*{message}'):
        config_file.read_config(path)
    assert cli.main(cli.train, [path]) == 2
    assert capsys.readouterr().err.startswith(f'error: config {path}: ') and not Path('work_dirs').exists()


@pytest.mark.parametrize(
    ('key', 'value', 'reason'),
    [
        *[
            (key, 1, '.')
            for key in ('neck.1.a', 'neck.first', 'hooks.0.type', 'lr.x', 'clip.norm', 'scale.0', 'neck.0')
        ],
        ('custom_imports', 'mine', 'mapping'),
        (
            'custom_imports.imports',
            'importing',
            "import importing: No module named 'missing'. A module is found in .*PYTH",
        ),
    ],
)
def test_options_that_cannot_be_merged(
    key: str, value: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / 'importing.py').write_text('import missing')
    monkeypatch.syspath_prepend(tmp_path)
    cfg = Config(dict(neck=[dict(a=1)], hooks=[], lr=0.1, clip=None, scale=(3, 4)))
    with pytest.raises(ConfigError, match=f'--cfg-options {key} cannot be merged: .*{reason}'):
        merge_options(cfg, {key: value})


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
