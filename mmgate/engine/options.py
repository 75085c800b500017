"""``--cfg-options``: what the mm tools accept is accepted; a name that looks misspelt is a warning."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from mmengine.config import Config
from mmengine.runner import FlexibleRunner, Runner
from torch.utils.data import DataLoader

from .preflight import ConfigError

# What the tools and the runners read from a config beside the runners' own arguments.
_TOP_LEVEL = {
    *('activation_checkpointing', 'auto_scale_lr', 'compile', 'custom_imports', 'efficient_conv_bn_eval'),
    *('find_unused_parameters', 'init_weights_for_test_or_val', 'model_wrapper_cfg', 'runner_type', 'sync_bn'),
    *('tta_model', 'tta_pipeline'),
}
# Alike enough to be a slip of the finger: 'max_epoch' is near 'max_epochs', 'in_channels' not near 'out_channels'.
_ALIKE = 0.8


def merge_options(cfg: Config, options: Mapping[str, Any]) -> None:
    """Merge ``options`` (dotted keys) into ``cfg`` as the mm tools do.

    Raises:
        ConfigError: A key cannot be merged, see :func:`check_options`.
    """
    check_options(cfg, options)
    try:
        cfg.merge_from_dict(dict(options))
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ConfigError(f'--cfg-options {" ".join(options)} cannot be merged: {error}') from error


def check_options(cfg: Config, options: Mapping[str, Any]) -> None:
    """Warn of keys that look misspelt and refuse those that cannot be merged.

    A new key is accepted wherever a dict is, because constructors take more than configs spell out. It is warned of
    when a neighbour's name is nearly the same.

    Raises:
        ConfigError: A key goes beyond a list, or below what is neither a dict nor a list.
    """
    for key in options:
        node: Any = cfg
        walked: list[str] = []
        for part in key.split('.'):
            here = '.'.join(walked)
            if isinstance(node, list):
                _check_index(key, here, node, part)
                node = node[int(part)]
            elif isinstance(node, (Config, Mapping)):
                if part not in node:
                    _warn_if_misspelt(key, walked, node, part)
                    break
                node = node[part]
            else:
                raise ConfigError(
                    f'--cfg-options {key}: {here} is {node!r}, which holds no {part!r}. Set {here} itself, or write '
                    'the dict into a config that inherits this one.'
                )
            walked.append(part)
        else:
            _check_element(key, options[key])


def _check_index(key: str, here: str, node: list, part: str) -> None:
    if not (part.isdigit() and int(part) < len(node)):
        numbers = f'a number below {len(node)}' if node else f'{here}="[...]" for a new one'
        raise ConfigError(
            f'--cfg-options {key}: {here} is a list of {len(node)}, and {part!r} is none of it; use {numbers}.'
        )


def _check_element(key: str, value: Any) -> None:
    """Refuse to replace one element of a list by a plain value, which mmengine cannot merge."""
    parent, _, last = key.rpartition('.')
    if last.isdigit() and parent and not isinstance(value, Mapping):
        raise ConfigError(f'--cfg-options {key}: a list takes new values as a whole, {parent}="[a,b]".')


def _warn_if_misspelt(key: str, walked: list[str], node: Mapping[str, Any], part: str) -> None:
    accepted: set[str] = set()
    if not walked:
        runners = (set(inspect.signature(runner).parameters) for runner in (Runner, FlexibleRunner))
        accepted = _TOP_LEVEL.union(*runners)
    elif walked[-1].endswith('_dataloader'):
        accepted = set(inspect.signature(DataLoader).parameters)
    if part in accepted:
        return
    near = difflib.get_close_matches(part, sorted(accepted | set(map(str, node))), n=1, cutoff=_ALIKE)
    if near:
        place = f'{".".join(walked)} has' if walked else 'the config has'
        meant = '.'.join([*walked, near[0]])
        warnings.warn(f'--cfg-options {key}: {place} no {part!r}; it is added. Did you mean {meant!r}?', stacklevel=2)
