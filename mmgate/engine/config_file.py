"""Configs of a command line: read from a file or a package, changed by its options."""

from __future__ import annotations

import argparse
import os.path as osp
from pathlib import Path

from mmengine.config import Config

from .config_checks import check_shape
from .options import merge_options
from .preflight import ConfigError, check_packages, remedy


def load_config(args: argparse.Namespace) -> Config:
    """Read ``args.config``, merge ``args.cfg_options`` and settle the work dir: argument, then config, then file name.

    Raises:
        ConfigError: The file is missing or malformed, or an option cannot be merged into the config.
    """
    cfg = read_config(args.config)
    if args.cfg_options:
        merge_options(cfg, args.cfg_options)
    check_shape(cfg)
    cfg.launcher = args.launcher
    name = osp.splitext(osp.basename(cfg.filename))[0]
    cfg.work_dir = args.work_dir or cfg.get('work_dir') or osp.join('./work_dirs', name)
    in_the_way = next((path for path in (Path(cfg.work_dir), *Path(cfg.work_dir).parents) if path.is_file()), None)
    if in_the_way:
        raise ConfigError(f'work dir {cfg.work_dir}: {in_the_way} is a file. Give another --work-dir.')
    return cfg


def read_config(config: str) -> Config:
    """Return the config of a file or of ``package::path``.

    Raises:
        ConfigError: The file is missing or malformed.
    """
    path = config
    if '::' in path:
        from mmengine.config.utils import _get_external_cfg_base_path, _get_package_and_cfg_path
        from mmengine.utils import get_installed_path

        try:
            package, relative = _get_package_and_cfg_path(path)
            path = _get_external_cfg_base_path(get_installed_path(package), relative)
        except (AssertionError, ValueError, FileNotFoundError, ModuleNotFoundError, ImportError) as error:
            raise ConfigError(f'config {config}: {error}') from error
    if not osp.isfile(path):
        raise ConfigError(f'config {path} does not exist (looked for {osp.abspath(path)}).')
    try:
        cfg = Config.fromfile(path)
    except (ImportError, AssertionError) as error:  # a base of a package that is not here
        raise ConfigError(f'config {path} cannot be read: {error}{remedy(str(error))}') from error
    except (OSError, SyntaxError, KeyError, TypeError, ValueError, AttributeError, NameError) as error:
        raise ConfigError(f'config {path} cannot be read: {type(error).__name__}: {error}') from error
    check_packages(cfg)
    return cfg
