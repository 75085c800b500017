"""Checks of a config by itself: what has to be a dict, a number or a registered name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from mmengine.config import Config
from mmengine.registry import OPTIMIZERS

from .preflight import ConfigError


def check_shape(cfg: Config) -> None:
    """Refuse plain values where only a dict will do, and text for a number, before anything reads inside."""
    loaders = [f'{split}_dataloader' for split in ('train', 'val', 'test')]
    for key in ('model', 'optim_wrapper', 'optim_wrapper.optimizer', *loaders):
        parent, _, leaf = key.rpartition('.')
        value = (cfg.get(parent) or {}).get(leaf) if parent else cfg.get(key)
        if isinstance(value, (str, int, float)):
            raise ConfigError(f'{key} must be a dict, got {value!r}; for one entry of it, give {key}.NAME=VALUE.')
    numbers = {'train_cfg': ('max_epochs', 'max_iters'), 'optim_wrapper.optimizer': ('lr', 'weight_decay')}
    numbers.update({loader: ('batch_size', 'num_workers') for loader in loaders})
    for key, leaves in numbers.items():
        node: Any = cfg
        for part in key.split('.'):
            node = node.get(part) if isinstance(node, (Mapping, Config)) else None
        for leaf in leaves if isinstance(node, Mapping) else ():
            if isinstance(node.get(leaf), str):
                raise ConfigError(f'{key}.{leaf} must be a number, got {node[leaf]!r}.')


def check_optimizer(cfg: Config) -> None:
    """Refuse an optimizer that is not registered, which mmengine takes for None."""
    kind = ((cfg.get('optim_wrapper') or {}).get('optimizer') or {}).get('type')
    if not isinstance(kind, str):
        return
    with OPTIMIZERS.switch_scope_and_registry(None) as registry:
        known = registry.get(kind)
    if known is None:
        near = difflib.get_close_matches(kind, [*registry.module_dict, *OPTIMIZERS.module_dict], n=1)
        raise ConfigError(
            f'optim_wrapper.optimizer.type: {kind} is not in the optimizer registry.'
            + (f' Did you mean {near[0]!r}?' if near else '')
        )
