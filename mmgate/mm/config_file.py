"""Read the config that a command line names, and merge ``--cfg-options`` into it."""

from __future__ import annotations

import argparse
import os
import os.path as osp
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from mmengine.config import Config, DictAction
from mmengine.config.utils import _get_package_and_cfg_path
from mmengine.utils import get_installed_path, import_modules_from_strings

from mmgate._environment import EITHER, EXTRAS, why_not
from mmgate.errors import TRUST, ConfigError

MMPRETRAIN = 'pip install "mmgate[pretrain]" (beside OpenMMLab\'s own packages: mmpretrain==1.2.0)'


def config_parser(description: str | None) -> argparse.ArgumentParser:
    """Return an argument parser with the arguments for a config and for changes to it."""
    raw = argparse.RawDescriptionHelpFormatter  # keeps the lines of a tool's docstring
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.add_argument('config', help="config file, or 'package::path' of an installed package's config")
    changed = 'override settings: key=value, nested keys by dots, lists as key="[a,b]"'
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help=changed)
    return parser


def read_config(config: str) -> Config:
    """Read a config from a file, or from an installed package as in ``mmdet::path``.

    Raises:
        ConfigError: The file is missing or malformed, or it needs mmpretrain, which is not installed.
    """
    path = config
    try:
        if '::' in config:
            package, relative = _get_package_and_cfg_path(config)
            path = osp.join(get_installed_path(package), '.mim/configs', relative)
        cfg = Config.fromfile(path)
    except Exception as error:  # the file is Python, and may raise anything
        remedy = f' Type: {MMPRETRAIN}' if 'mmpretrain' in str(error) else ''
        raise ConfigError(f'config {config}: cannot be read: {type(error).__name__}: {error}.{remedy}') from error
    problem = why_not('mmpretrain') if cfg.get('default_scope') == 'mmpretrain' else None
    if problem:
        raise ConfigError(f'config {config}: {problem}. Type: {MMPRETRAIN}')
    return cfg


def merge_options(cfg: Config, options: Mapping[str, Any]) -> None:
    """Merge ``--cfg-options`` (a dict with dotted keys) into a config, and import their ``custom_imports``.

    Raises:
        ConfigError: A key goes beyond the end of a list, or into a value that is neither a dict nor a list; or a module
            of ``custom_imports`` cannot be imported.
    """
    try:
        cfg.merge_from_dict(dict(options))
        # mmengine imports them while it reads the file, before there are options.
        if any(key.partition('.')[0] == 'custom_imports' for key in options):
            import_modules_from_strings(**cfg.custom_imports)
    except (AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError) as error:
        # mmengine's error names the module, and not the import in it that failed.
        reason = f'{error}: {error.__context__}' if error.__context__ else error
        remedy = ' A module is found in the folders of PYTHONPATH.' if isinstance(error, ImportError) else ''
        raise ConfigError(f'--cfg-options {" ".join(options)} cannot be merged: {reason}.{remedy}') from error


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
    named_type = entry.get('type')
    return getattr(named_type, '__name__', str(named_type)).rpartition('.')[2]


def package_of(cfg: Config) -> str | None:
    """Return the package that a config's model is of: ``'mmdet'``, ``'mmseg'`` or ``'mmpretrain'``; None if unknown.

    The ``default_scope`` tells it. Configs in pure Python have none: there it is the package of the model's class or
    data preprocessor, or the scope of their names.
    """
    if cfg.get('default_scope'):
        return str(cfg.default_scope)
    model = cfg.get('model') or {}
    preprocessor = model.get('data_preprocessor') or cfg.get('data_preprocessor') or {}
    for named_type in (model.get('host'), model.get('type'), preprocessor.get('type')):
        # A class of the user's own is derived from one of a package.
        names = [base.__module__ for base in named_type.__mro__] if isinstance(named_type, type) else [str(named_type)]
        packages = [name.partition('.')[0] for name in names if '.' in name]
        found = next((package for package in packages if package in (*EITHER, *EXTRAS)), None)
        if found:
            return found
    return None


def innermost(dataset: Any) -> Any:
    """Return the config of the data set inside wrappers such as RepeatDataset."""
    while 'pipeline' not in dataset and 'dataset' in dataset:
        dataset = dataset.dataset
    return dataset


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


def check_checkpoint(path: str, *, sharded: bool = False) -> None:
    """Raise ConfigError if a local checkpoint does not exist; URLs are not checked.

    Args:
        path: File or URL.
        sharded: True accepts a folder with one file for each process, as FSDP and DeepSpeed write it.

    Raises:
        ConfigError: It does not exist, or is a folder.
    """
    if '://' in path or osp.isfile(osp.expanduser(path)) or (sharded and osp.isdir(path)):
        return
    fault = 'is a folder' if osp.isdir(path) else 'does not exist'
    raise ConfigError(f'checkpoint {path} {fault} (looked for {osp.abspath(path)}).')
