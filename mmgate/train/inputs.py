"""Data and checkpoints that a config names, looked for before anything is built."""

from __future__ import annotations

import os.path as osp
import re
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.registry import DATASETS, METRICS
from torch import nn

from mmgate.errors import ConfigError
from mmgate.layers import MultiScaleDeformableAttention, PLuGAttention
from mmgate.ops.backend import OPERATORS, candidates

from .config_file import mappings, type_name

HOSTS = ('mmengine', 'mmcv', 'mmdet', 'mmseg', 'mmpretrain', 'mmgate')


def check_data(cfg: Config, splits: Sequence[str]) -> None:
    """Refuse a config whose local annotation files or data folders are missing, as far as the mm packages read them.

    Raises:
        ConfigError: With the config path of the entry and the path looked for.
    """
    scope = cfg.get('default_scope')
    for split in splits:
        loader = cfg.get(f'{split}_dataloader') if cfg.get(f'{split}_cfg') is not None else None
        data = [(f'{split}_dataloader.dataset', loader.dataset)] if loader and loader.get('dataset') else []
        for where, dataset in _innermost(data):
            # someone's own data set may find its files otherwise; some of mmpretrain's download theirs, or know them
            theirs = 'split' in dataset or dataset.get('download', False)
            if not theirs and _is_of_hosts(dataset, DATASETS, scope):
                _check_dataset(dataset, where)
        evaluators = cfg.get(f'{split}_evaluator') if split != 'train' else None
        for evaluator in evaluators if isinstance(evaluators, (list, tuple)) else [evaluators]:
            ann_file = evaluator.get('ann_file') if isinstance(evaluator, Mapping) else None
            if ann_file and _is_local(ann_file, evaluator) and _is_of_hosts(evaluator, METRICS, scope):
                _require(f'{split}_evaluator.ann_file', ann_file)


def _innermost(entries: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the data sets within wrappers such as RepeatDataset and ConcatDataset, with their config paths."""
    found = []
    for where, entry in entries:
        inner = [(f'{where}.dataset', entry['dataset'])] if 'dataset' in entry else []
        inner += [(f'{where}.datasets.{number}', one) for number, one in enumerate(entry.get('datasets', ()))]
        found += _innermost(inner) if inner else [(where, entry)]
    return found


def _check_dataset(dataset: Mapping[str, Any], where: str) -> None:
    root, ann_file, prefix = dataset.get('data_root') or '', dataset.get('ann_file'), dataset.get('data_prefix')
    folders = {'data_prefix': prefix} if isinstance(prefix, str) else {}
    if isinstance(prefix, Mapping):
        folders = {f'data_prefix.{key}': prefix[key] for key in ('img', 'img_path') if prefix.get(key)}
    named = {'ann_file': ann_file} if ann_file else folders  # whose files are listed
    local = {key: path for key, path in named.items() if isinstance(path, str) and path and _is_local(path, dataset)}
    if not _is_local(root, dataset):
        return
    if root and (not named or not all(osp.isabs(path) for path in local.values())):
        _require(f'{where}.data_root', root)
    for key, path in local.items():
        _require(f'{where}.{key}', osp.join(root, path))


def _is_of_hosts(entry: Mapping[str, Any], registry: Any, scope: str | None) -> bool:
    kind = entry.get('type')
    if isinstance(kind, str):
        with registry.switch_scope_and_registry(scope) as found:
            kind = found.get(kind)
    return str(getattr(kind, '__module__', '')).partition('.')[0] in HOSTS


def _is_local(path: str, owner: Mapping[str, Any]) -> bool:
    return '://' not in path and not owner.get('backend_args')


def _require(entry: str, path: str) -> None:
    if not osp.exists(path):
        raise ConfigError(
            f'{entry}: {path} does not exist (looked for {osp.abspath(path)}). Put the data set there, link it, or '
            'point the config at it with --cfg-options.'
        )


def check_pretrained(cfg: Config) -> None:
    """Refuse a config whose model starts from a local checkpoint that cannot be read.

    Raises:
        ConfigError: With the config path of the ``init_cfg`` and the reason.
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
    """Refuse a local checkpoint that is missing, cut short or no checkpoint; URLs pass.

    Args:
        path: File or URL.
        sharded: Whether a folder with one file a process will do, as FSDP and DeepSpeed write them.

    Raises:
        ConfigError: With the reason.
    """
    if '://' in path or (sharded and osp.isdir(path)):
        return
    if not osp.isfile(path):
        what = 'is a folder' if osp.isdir(path) else 'does not exist'
        raise ConfigError(f'checkpoint {path} {what} (looked for {osp.abspath(path)}).')
    with open(path, 'rb') as file:
        head = file.read(2)
    if head == b'PK' and not zipfile.is_zipfile(path):
        raise ConfigError(f'checkpoint {path} is cut short; copy or download it again.')
    if head != b'PK' and head[:1] != b'\x80' and not path.endswith('.safetensors'):
        raise ConfigError(f'checkpoint {path} is no torch checkpoint; it starts with {head!r}.')


def check_backends(model: nn.Module) -> None:
    """Refuse a backend, of a rule or of an environment variable, that cannot run on the device of training and testing.

    Raises:
        ConfigError: With the attention's name and the reason.
    """
    for name, module in model.named_modules():
        if isinstance(module, MultiScaleDeformableAttention):
            operator, width = 'ms_deform_attn', module.value_proj.out_features
        elif isinstance(module, PLuGAttention):
            operator, width = 'plug_attention', module.embed_dim
        else:
            continue
        heads = torch.empty(1, 1, module.num_heads, width // module.num_heads, device=get_device())
        try:
            candidates(operator, OPERATORS[operator], heads, module.backend)
        except ValueError as error:
            raise ConfigError(f'{name}: {error}') from error
