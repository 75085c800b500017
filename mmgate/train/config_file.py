"""Read the config that a command line names, merge ``--cfg-options`` into it, and check its files.

Missing data and checkpoints are reported before anything is built.
"""

from __future__ import annotations

import argparse
import os
import os.path as osp
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from mmengine.config import Config, DictAction
from mmengine.registry import DATASETS, METRICS
from mmengine.utils import import_modules_from_strings

from mmgate._environment import EXTRAS, HOSTS, MM, why_not
from mmgate.checkpoints.loading import TRUST
from mmgate.errors import ConfigError

MMPRETRAIN = 'pip install "mmgate[pretrain]" (beside OpenMMLab\'s own packages: mmpretrain==1.2.0)'
PACKAGES = (*MM, 'mmgate')


def config_parser(description: str | None) -> argparse.ArgumentParser:
    """Return an argument parser with the arguments for a config and for changes to it."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument('config', help="config file, or 'package::path' of an installed package's config")
    changed = 'override settings: key=value, nested keys by dots, lists as key="[a,b]"'
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help=changed)
    return parser


def load_config(args: argparse.Namespace) -> Config:
    """Return the config that parsed arguments describe, with their changes and a work dir.

    The work dir is the argument's, else the config's, else one named after the config file.

    Raises:
        ConfigError: The file is missing or malformed, or an option cannot be merged into the config.
    """
    cfg = read_config(args.config)
    merge_options(cfg, args.cfg_options or {})
    cfg.launcher = args.launcher
    name = osp.splitext(osp.basename(cfg.filename))[0]
    cfg.work_dir = args.work_dir or cfg.get('work_dir') or osp.join('./work_dirs', name)
    return cfg


def read_config(config: str) -> Config:
    """Read a config from a file, or from an installed package as in ``mmdet::path``.

    Raises:
        ConfigError: The file is missing or malformed, or it needs mmpretrain, which is not installed.
    """
    path = config
    if '::' in path:
        from mmengine.config.utils import _get_external_cfg_base_path, _get_package_and_cfg_path
        from mmengine.utils import get_installed_path

        try:
            package, relative = _get_package_and_cfg_path(path)
            path = _get_external_cfg_base_path(get_installed_path(package), relative)
        except (AssertionError, ValueError, FileNotFoundError, ImportError) as error:
            raise ConfigError(f'config {config}: {error}') from error
    if not osp.isfile(path):
        raise ConfigError(f'config {path} does not exist (looked for {osp.abspath(path)}).')
    try:
        cfg = Config.fromfile(path)
    except Exception as error:  # the file is Python, and may raise anything
        remedy = f' Type: {MMPRETRAIN}' if 'mmpretrain' in str(error) else ''
        raise ConfigError(f'config {path}: cannot be read: {type(error).__name__}: {error}.{remedy}') from error
    problem = why_not('mmpretrain') if cfg.get('default_scope') == 'mmpretrain' else None
    if problem:
        raise ConfigError(f'config {path}: {problem}. Type: {MMPRETRAIN}')
    return cfg


def merge_options(cfg: Config, options: Mapping[str, Any]) -> None:
    """Merge ``--cfg-options``, a dict with dotted keys, into a config as mm tools do, and import what they name.

    They name modules in ``custom_imports``.

    Raises:
        ConfigError: A key goes beyond the end of a list, or into a value that is neither a dict nor a list; or a module
            of ``custom_imports`` cannot be imported.
    """
    try:
        cfg.merge_from_dict(dict(options))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f'--cfg-options {" ".join(options)} cannot be merged: {error}') from error
    # mmengine imports them while it reads the file, before there are options.
    if any(key.partition('.')[0] == 'custom_imports' for key in options):
        if not isinstance(cfg.custom_imports, Mapping):
            raise ConfigError(
                f'--cfg-options custom_imports={cfg.custom_imports}: it must be a dict; name modules by '
                'custom_imports.imports=MODULE.'
            )
        try:
            import_modules_from_strings(**cfg.custom_imports)
        except (ImportError, TypeError) as error:
            # mmengine names the module alone, where the fault may lie in what it imports.
            reason = f'{error}: {error.__context__}' if error.__context__ else str(error)
            raise ConfigError(
                f'--cfg-options custom_imports: {reason}. A module is found in the folders of PYTHONPATH.'
            ) from error


def mappings(node: object, where: str = '') -> Iterator[tuple[str, Any]]:
    """Yield each dict in a config with its dotted path, outer ones first."""
    if isinstance(node, Mapping):
        yield where, node
        for key, value in node.items():
            yield from mappings(value, f'{where}.{key}')
    elif isinstance(node, (list, tuple)):
        for number, value in enumerate(node):
            yield from mappings(value, f'{where}.{number}')


def differences(before: object, now: object, where: str) -> Iterator[str]:
    """Yield each difference of two configs as text, such as ``model.attention.gml: 'sum' -> 'product'``.

    Args:
        before: The older value.
        now: The newer value.
        where: Path of both.
    """
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*before, *now]):
            yield from differences(before.get(key, _NOTHING), now.get(key, _NOTHING), f'{where}.{key}'.lstrip('.'))
    elif isinstance(before, (list, tuple)) and isinstance(now, (list, tuple)):
        for number, (one, other) in enumerate(zip_longest(before, now, fillvalue=_NOTHING)):
            yield from differences(one, other, f'{where}.{number}')
    elif before != now:
        yield f'{where}: {before!r} -> {now!r}'


class _Nothing:
    def __repr__(self) -> str:
        return 'not set'


_NOTHING = _Nothing()


def type_name(entry: Mapping[str, Any]) -> str:
    """Return the name of the class that a config entry's ``type`` is or names, without a scope."""
    kind = entry.get('type')
    return getattr(kind, '__name__', str(kind)).rpartition('.')[2]


def host_package(cfg: Config) -> str | None:
    """Return the package that a config's model is of: ``'mmdet'``, ``'mmseg'`` or ``'mmpretrain'``; None if unknown.

    It is the ``default_scope``, any package's, or in a config without one, as those in pure Python are, the package of
    the class or the scope of the name that ``model`` or its data preprocessor has.
    """
    if cfg.get('default_scope'):
        return str(cfg.default_scope)
    model = cfg.get('model') or {}
    preprocessor = model.get('data_preprocessor') or cfg.get('data_preprocessor') or {}
    for kind in (model.get('host'), model.get('type'), preprocessor.get('type')):
        # A class of the user's own is derived from one of a package.
        names = [base.__module__ for base in kind.__mro__] if isinstance(kind, type) else [str(kind)]
        packages = [name.partition('.')[0] for name in names if '.' in name]
        found = next((package for package in packages if package in (*HOSTS, *EXTRAS)), None)
        if found:
            return found
    return None


def add_trust_option(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--trust-checkpoint`` to a parser; it holds for this process and those that it starts."""
    parser.add_argument(
        '--trust-checkpoint',
        action=_Trust,
        nargs=0,
        help='load a checkpoint as pickle does, code and all: only one whose maker you trust',
    )


class _Trust(argparse.Action):
    def __call__(self, *_: object) -> None:
        os.environ[TRUST] = '1'


def check_files(cfg: Config, splits: Sequence[str]) -> None:
    """Raise ConfigError if data, pretrained weights or the checkpoint of a config are missing or unreadable.

    Raises:
        ConfigError: A file cannot be used; the message has its setting and the reason.
    """
    check_data(cfg, splits)
    if 'train' in splits:
        check_pretrained(cfg)
    if cfg.get('load_from'):
        check_checkpoint(cfg.load_from, sharded='strategy' in cfg)


def check_data(cfg: Config, splits: Sequence[str]) -> None:
    """Raise ConfigError if local annotation files or data folders that a config names are missing.

    Raises:
        ConfigError: A file or folder is missing; the message has its setting and its path.
    """
    for split in splits:
        if cfg.get(f'{split}_cfg') is None:
            continue
        loader = cfg.get(f'{split}_dataloader') or {}
        entries = [*mappings(loader.get('dataset'), f'{split}_dataloader.dataset')]
        if split != 'train':
            entries += mappings(cfg.get(f'{split}_evaluator'), f'{split}_evaluator')
        for where, entry in entries:
            # A user's data set may find its files otherwise, and some of mmpretrain's download or list theirs.
            theirs = 'split' in entry or entry.get('download') or entry.get('backend_args')
            if not theirs and _is_of_packages(entry, cfg.get('default_scope')):
                _check_files(entry, where)


def _is_of_packages(entry: Mapping[str, Any], scope: str | None) -> bool:
    for registry in (DATASETS, METRICS):
        kind = entry.get('type')
        if isinstance(kind, str):
            with registry.switch_scope_and_registry(scope) as found:
                kind = found.get(kind)
        if str(getattr(kind, '__module__', '')).partition('.')[0] in PACKAGES:
            return True
    return False


def _check_files(entry: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if the annotation file of a data set or metric, or its data folders, are missing."""
    root = entry.get('data_root') or ''
    ann_file = entry.get('ann_file')
    prefix = entry.get('data_prefix')
    named = {'ann_file': ann_file} if ann_file else {'data_prefix': prefix}
    if not ann_file and isinstance(prefix, Mapping):
        named = {f'data_prefix.{key}': prefix[key] for key in ('img', 'img_path') if prefix.get(key)}
    named = {key: path for key, path in named.items() if path and isinstance(path, str)} or {'data_root': ''}
    for key, name in named.items():
        path = osp.join(root, name) if name else root
        if path and '://' not in path and not osp.exists(path):
            raise ConfigError(
                f'{where}.{key}: {path} does not exist (looked for {osp.abspath(path)}). Put the data set there, link '
                'it, or point the config at it with --cfg-options.'
            )


def check_pretrained(cfg: Config) -> None:
    """Raise ConfigError if a part of the model starts from a local checkpoint that cannot be read.

    Raises:
        ConfigError: A checkpoint cannot be read; the message has the setting of its ``init_cfg`` and the reason.
    """
    for where, entry in mappings(cfg.get('model') or {}, 'model'):
        path = str(entry.get('checkpoint'))
        if type_name(entry) == 'Pretrained' and not re.match(r'\w[\w-]+:', path):  # https://, torchvision://
            try:
                check_checkpoint(path)
            except ConfigError as error:
                raise ConfigError(
                    f'{where}.checkpoint: {error} Put it there, or start from scratch with --cfg-options {where}=None.'
                ) from None


def check_checkpoint(path: str, *, sharded: bool = False) -> None:
    """Raise ConfigError if a local checkpoint is missing, cut short or no checkpoint; URLs are not checked.

    Args:
        path: File or URL.
        sharded: True accepts a folder with one file for each process, as FSDP and DeepSpeed write it.

    Raises:
        ConfigError: The file cannot be used; the message has the reason.
    """
    if '://' in path or (sharded and osp.isdir(path)):
        return
    if not osp.isfile(path):
        fault = 'is a folder' if osp.isdir(path) else 'does not exist'
        raise ConfigError(f'checkpoint {path} {fault} (looked for {osp.abspath(path)}).')
    with open(path, 'rb') as file:
        head = file.read(2)
    if head == b'PK' and not zipfile.is_zipfile(path):
        raise ConfigError(f'checkpoint {path} is cut short; copy or download it again.')
    if head != b'PK' and head[:1] != b'\x80' and not path.endswith('.safetensors'):
        raise ConfigError(f'checkpoint {path} is no torch checkpoint; it starts with {head!r}.')
