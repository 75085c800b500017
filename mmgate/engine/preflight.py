"""Checks of a config against the world, before anything is built."""

from __future__ import annotations

import os
import os.path as osp
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.registry import DATASETS, METRICS, Registry

from mmgate._environment import why_not

DOWNLOADED = ('CIFAR10', 'CIFAR100', 'FashionMNIST', 'MNIST')  # mmpretrain's, where nothing is there
HOSTS = ('mmengine', 'mmcv', 'mmdet', 'mmseg', 'mmpretrain', 'mmgate')
EXTRAS = {'mmpretrain': 'pip install "mmgate[pretrain]" (beside OpenMMLab\'s own packages: mmpretrain==1.2.0)'}


class ConfigError(ValueError):
    """The user's input is wrong; the message says what, what was expected and what to do."""


def remedy(text: str) -> str:
    """Return what to type for the packages that an error's ``text`` names, if anything."""
    return ''.join(f' Type: {line}' for package, line in EXTRAS.items() if package in text)


def check_packages(cfg: Config) -> None:
    """Refuse a config of an optional package that cannot be used here.

    Raises:
        ConfigError: With what to type.
    """
    scope = cfg.get('default_scope')
    if scope in EXTRAS:
        problem = why_not(scope)
        if problem:
            raise ConfigError(f'config {cfg.filename} is one of {scope}, and {problem}.{remedy(scope)}')


def check_writable(path: Path) -> None:
    """Make the folder of a file, and refuse a path that none can be written to.

    Raises:
        ConfigError: With the reason.
    """
    check_folder(path.parent)
    if path.is_dir():
        raise ConfigError(f'{path} is a folder. Give another --out.')


def check_folder(folder: Path) -> None:
    """Make a folder, and refuse one that nothing can be written to.

    Raises:
        ConfigError: With the reason.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f'nothing can be written to {folder}: {error}. Give another --out.') from error


def check_data(cfg: Config, splits: Sequence[str]) -> None:
    """Refuse a config whose local data files or folders are missing, as far as the mm packages' own classes read them.

    Raises:
        ConfigError: With the config path of the entry and the path looked for.
    """
    scope = cfg.get('default_scope')
    for split in splits:
        loader = cfg.get(f'{split}_dataloader')
        if loader and loader.get('dataset') and cfg.get(f'{split}_cfg') is not None:
            for entry, path in _dataset_paths(loader.dataset, f'{split}_dataloader.dataset', scope):
                _require(entry, path)
        evaluators = cfg.get(f'{split}_evaluator') if split != 'train' else None
        listed: Sequence[Any] = evaluators if isinstance(evaluators, (list, tuple)) else [evaluators]
        for evaluator in listed:
            ann_file = evaluator.get('ann_file') if isinstance(evaluator, Mapping) else None
            if ann_file and _is_local(ann_file, evaluator) and is_of_hosts(_class_of(evaluator, METRICS, scope)):
                _require(f'{split}_evaluator.ann_file', ann_file)


def _dataset_paths(dataset: Mapping[str, Any], where: str, scope: str | None) -> Iterator[tuple[str, str]]:
    """Yield the paths without which a data set cannot list its samples; those of the samples are looked at later."""
    for key in ('dataset', 'datasets'):
        inner = dataset.get(key)
        if isinstance(inner, Mapping):
            yield from _dataset_paths(inner, f'{where}.{key}', scope)
        elif isinstance(inner, (list, tuple)):
            for number, one in enumerate(inner):
                yield from _dataset_paths(one, f'{where}.{key}.{number}', scope)
    if 'dataset' in dataset or 'datasets' in dataset or not is_of_hosts(_class_of(dataset, DATASETS, scope)):
        return  # a wrapper, or someone's own, which may find its files otherwise
    root = dataset.get('data_root') or ''
    if dataset.get('split') and not dataset.get('data_prefix') and _is_kind(dataset, 'ImageNet'):
        dataset = {**dataset, 'data_prefix': dataset['split']}
    if dataset.get('download', True) and _is_kind(dataset, *DOWNLOADED):
        return
    if not _is_local(root, dataset):
        return
    ann_file = dataset.get('ann_file')
    named = {'ann_file': ann_file} if ann_file else _folders_of_images(dataset)  # which are listed
    local = {key: path for key, path in named.items() if isinstance(path, str) and path and _is_local(path, dataset)}
    if root and (not named or not all(osp.isabs(path) for path in local.values())):
        yield f'{where}.data_root', root
    for key, path in local.items():
        yield f'{where}.{key}', osp.join(root, path)


def _folders_of_images(dataset: Mapping[str, Any]) -> dict[str, Any]:
    prefix = dataset.get('data_prefix')
    if isinstance(prefix, str):
        return {'data_prefix': prefix}
    keys = [key for key in ('img', 'img_path') if isinstance(prefix, Mapping) and prefix.get(key)]
    return {f'data_prefix.{key}': prefix[key] for key in keys} if isinstance(prefix, Mapping) else {}


def _class_of(entry: Mapping[str, Any], registry: Registry, scope: str | None) -> Any:
    """Return the class that a config entry names, None if none is known."""
    kind = entry.get('type')
    if not isinstance(kind, str):
        return kind
    with registry.switch_scope_and_registry(scope) as found:
        return found.get(kind)


def is_of_hosts(code: Any) -> bool:
    """Return whether a class or function is of the mm packages or ours, and not of someone's project."""
    return str(getattr(code, '__module__', '')).partition('.')[0] in HOSTS


def type_name(entry: Mapping[str, Any]) -> str:
    """Return the bare name of what a config entry's ``type`` is: a class, or its name with or without a scope."""
    kind = entry.get('type')
    return getattr(kind, '__name__', str(kind)).rpartition('.')[2]


def _is_kind(dataset: Mapping[str, Any], *kinds: str) -> bool:
    return type_name(dataset) in kinds


def _is_local(path: str, owner: Mapping[str, Any]) -> bool:
    return '://' not in path and not owner.get('backend_args')


def _require(entry: str, path: str) -> None:
    if not osp.exists(path):
        raise ConfigError(
            f'{entry}: {path} does not exist (looked for {osp.abspath(path)}). Put the data set there, link it, or '
            f'point the config at it with --cfg-options; the generated shapes come from '
            f'tools/dataset_converters/make_shapes.py.'
        )


def check_pretrained(cfg: Config) -> None:
    """Refuse a config whose model starts from a local checkpoint that cannot be read.

    Raises:
        ConfigError: With the config path of the ``init_cfg`` and the reason.
    """
    for where, entry in mappings(cfg.get('model') or {}, 'model'):
        path = str(entry.get('checkpoint'))
        if entry.get('type') != 'Pretrained' or re.match(r'\w[\w-]+:', path):  # https://, torchvision://
            continue
        try:
            check_checkpoint(path)
        except ConfigError as error:
            raise ConfigError(
                f'{where}.checkpoint: {error} Put it there, convert a published one with '
                f'tools/model_converters/agent_attention.py, or start from scratch with '
                f'--cfg-options {where}=None.'
            ) from None


def mappings(node: Any, where: str = '') -> Iterator[tuple[str, Any]]:
    """Yield every mapping of a config with its path below ``where``, outer ones first."""
    if isinstance(node, Mapping):
        yield where, node
        for key, value in node.items():
            yield from mappings(value, f'{where}.{key}')
    elif isinstance(node, (list, tuple)):
        for number, value in enumerate(node):
            yield from mappings(value, f'{where}.{number}')


def check_checkpoint(path: str, *, sharded: bool = False) -> None:
    """Refuse a local checkpoint that is missing, cut short or no checkpoint; URLs pass.

    Args:
        path: File or URL.
        sharded: Whether a folder with one file a process will do, as FSDP and DeepSpeed write them.

    Raises:
        ConfigError: With the reason.
    """
    if path.startswith('file://'):
        raise ConfigError(f'checkpoint {path} is no path; give {path.removeprefix("file://")}.')
    if '://' in path:
        return
    if osp.isdir(path):
        if not sharded:
            raise ConfigError(
                f'checkpoint {path} is a folder, which only a run with runner_type="FlexibleRunner" and the strategy '
                'that wrote it can read.'
            )
        if not any(os.scandir(path)):
            raise ConfigError(f'checkpoint {path} is an empty folder.')
        return
    if not osp.isfile(path):
        raise ConfigError(f'checkpoint {path} does not exist (looked for {osp.abspath(path)}).')
    with open(path, 'rb') as file:
        head = file.read(4)
    if path.endswith('.safetensors'):
        return
    if head[:2] == b'PK':
        if not zipfile.is_zipfile(path):
            raise ConfigError(f'checkpoint {path} is cut short; copy or download it again.')
    elif head[:1] != b'\x80':  # neither torch's zip nor a pickle of old
        raise ConfigError(f'checkpoint {path} is no torch checkpoint; it starts with {head!r}.')


def check_device(device: str) -> None:
    """Refuse a ``--device`` that is not there.

    Raises:
        ConfigError: torch knows no device of that name, or it is a GPU that torch does not see.
    """
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f'--device {device}: give cpu or cuda.') from error
    if wanted.type == 'cuda' and (wanted.index or 0) >= torch.cuda.device_count():
        there = torch.cuda.device_count()
        raise ConfigError(
            f'--device {device}: torch sees {f"{there} GPUs, from cuda:0 on" if there else "no GPU"} here.'
        )
    if wanted.type == 'meta':
        raise ConfigError('--device meta: give cpu or cuda; it computes nothing.')


def check_amp(cfg: Config) -> None:
    """Refuse mixed precision where mmengine has none.

    Raises:
        ConfigError: The optimizer wrapper is mmengine's AmpOptimWrapper and there is no accelerator.
    """
    if type_name(cfg.get('optim_wrapper') or {}) == 'AmpOptimWrapper' and get_device() in ('cpu', 'mps'):
        raise ConfigError(
            'mixed precision: AmpOptimWrapper needs a GPU, and there is none here. Leave --amp out; '
            "if the config itself asks for it, inherit it with optim_wrapper=dict(type='OptimWrapper', _delete_=True, "
            'optimizer=...).'
        )
