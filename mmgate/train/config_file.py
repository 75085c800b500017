"""Configs of a command line: read from a file or a package, and changed by ``--cfg-options``.

What the mm tools accept is accepted; a name that looks misspelt is a warning.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import os.path as osp
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from mmengine.config import Config, DictAction
from mmengine.runner import FlexibleRunner, Runner
from torch.utils.data import DataLoader

from mmgate._environment import why_not
from mmgate.errors import ConfigError

EXTRAS = {'mmpretrain': 'pip install "mmgate[pretrain]" (beside OpenMMLab\'s own packages: mmpretrain==1.2.0)'}
# What the tools and the runners read from a config beside the runners' own arguments.
_TOP_LEVEL = {
    *('activation_checkpointing', 'auto_scale_lr', 'check_data', 'compile', 'custom_imports'),
    *('efficient_conv_bn_eval', 'find_unused_parameters', 'init_weights_for_test_or_val', 'model_wrapper_cfg'),
    *('runner_type', 'sync_bn', 'tta_model', 'tta_pipeline'),
}
# Alike enough to be a slip of the finger: 'max_epoch' is near 'max_epochs', 'in_channels' not near 'out_channels'.
_ALIKE = 0.8


def load_config(args: argparse.Namespace) -> Config:
    """Read ``args.config``, merge ``args.cfg_options`` and settle the work dir: argument, then config, then file name.

    Raises:
        ConfigError: The file is missing or malformed, or an option cannot be merged into the config.
    """
    cfg = read_config(args.config)
    if args.cfg_options:
        merge_options(cfg, args.cfg_options)
    cfg.launcher = args.launcher
    name = osp.splitext(osp.basename(cfg.filename))[0]
    cfg.work_dir = args.work_dir or cfg.get('work_dir') or osp.join('./work_dirs', name)
    return cfg


def read_config(config: str) -> Config:
    """Return the config of a file or of ``package::path``.

    Raises:
        ConfigError: The file is missing or malformed, or is of an optional package that is not here.
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
        raise ConfigError(f'config {path} cannot be read: {type(error).__name__}: {error}{_remedy(error)}') from error
    scope = cfg.get('default_scope')
    problem = why_not(scope) if scope in EXTRAS else None
    if problem:
        raise ConfigError(f'config {path} is one of {scope}, and {problem}.{_remedy(scope)}')
    return cfg


def _remedy(text: object) -> str:
    """Return what to type for the packages that a text names, if anything."""
    return ''.join(f' Type: {line}' for package, line in EXTRAS.items() if package in str(text))


def mappings(node: Any, where: str = '') -> Iterator[tuple[str, Any]]:
    """Yield every mapping of a config with its path below ``where``, outer ones first."""
    if isinstance(node, Mapping):
        yield where, node
        for key, value in node.items():
            yield from mappings(value, f'{where}.{key}')
    elif isinstance(node, (list, tuple)):
        for number, value in enumerate(node):
            yield from mappings(value, f'{where}.{number}')


def type_name(entry: Mapping[str, Any]) -> str:
    """Return the bare name of what a config entry's ``type`` is: a class, or its name with or without a scope."""
    kind = entry.get('type')
    return getattr(kind, '__name__', str(kind)).rpartition('.')[2]


class Options(DictAction):
    """mmengine's, with a message for what it cannot read, and blanks kept in plain text, such as a path."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Add the options to the namespace."""
        texts: dict[str, str] = {}
        for option in values:
            key, sign, value = option.partition('=')
            if not sign or key != key.strip():
                parser.error(
                    f'--cfg-options {option}: write key=value, without blanks around the sign; a value with blanks '
                    'goes into quotes, as in key="[1, 2]".'
                )
            texts.pop(key, None)  # the last one counts
            if ' ' in value.strip() and ',' not in value and not value.strip().startswith(('(', '[')):
                texts[key] = value.strip().strip('\'"')
        try:
            super().__call__(parser, namespace, values, option_string)
        except AssertionError as error:
            parser.error(f'--cfg-options {" ".join(values)}: {error}')
        found = getattr(namespace, self.dest)
        found.update((key, text) for key, text in texts.items() if isinstance(found[key], str))


def merge_options(cfg: Config, options: Mapping[str, Any]) -> None:
    """Merge ``options`` (dotted keys) into ``cfg`` as the mm tools do, and warn of keys that look misspelt.

    A new key is accepted wherever a dict is, because constructors take more than configs spell out. It is warned of
    when a neighbour's name is nearly the same.

    Raises:
        ConfigError: A key goes beyond a list, or below what is neither a dict nor a list.
    """
    for key in options:
        _warn_if_misspelt(cfg, key)
    try:
        cfg.merge_from_dict(dict(options))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f'--cfg-options {" ".join(options)} cannot be merged: {error}') from error


def _warn_if_misspelt(cfg: Config, key: str) -> None:
    node: Any = cfg
    parts = key.split('.')
    walked = 0
    while walked < len(parts) and isinstance(node, (Config, Mapping)) and parts[walked] in node:
        node = node[parts[walked]]
        walked += 1
        while isinstance(node, list) and walked < len(parts) and parts[walked].isdigit():
            node = node[int(parts[walked])] if int(parts[walked]) < len(node) else None
            walked += 1
    if walked == len(parts) or not isinstance(node, (Config, Mapping)):
        return
    accepted: set[str] = set()
    if not walked:
        runners = (set(inspect.signature(runner).parameters) for runner in (Runner, FlexibleRunner))
        accepted = _TOP_LEVEL.union(*runners)
    elif parts[walked - 1].endswith('_dataloader'):
        accepted = set(inspect.signature(DataLoader).parameters)
    if parts[walked] in accepted:
        return
    near = difflib.get_close_matches(parts[walked], sorted(accepted | set(map(str, node))), n=1, cutoff=_ALIKE)
    if near:
        meant = '.'.join([*parts[:walked], near[0]])
        warnings.warn(f'--cfg-options {key} is new, and is added. Did you mean {meant!r}?', stacklevel=3)
