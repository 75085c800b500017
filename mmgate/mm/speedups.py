"""Changes to any config that make its training step faster: the option ``--speedups``.

- An optimizer with few parameter groups, fused, launches fewer kernels: ``parameter_groups.py``.
- Predictions of all layers and images are matched at once, with one wait for the GPU: ``mmgate/speed/matching``.
- Deformable attention without a gate samples by mmgate's operator where that is faster: ``mmgate/speed/sampling.py``.
- The backbone computes with channels last.

The hooks of the last three are in ``mmgate/speed/hooks.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from mmengine.config import Config

from mmgate.registry import MODELS

from .config_file import differences, mappings, type_name
from .gate_options import group_parameters, import_mmgate, type_path
from .parameter_groups import GroupedOptimWrapperConstructor


def speed_up(cfg: Config) -> str:
    """Change a config to the faster step that mmgate's own configs have; the computation stays the same to rounding.

    Returns:
        A line for the log with the settings that changed.
    """
    before = deepcopy(cfg.to_dict())
    import_mmgate(cfg)
    for change in DEFAULTS:
        SPEEDUPS[change](cfg)
    changed = '; '.join(differences(before, cfg.to_dict(), ''))
    return f'--speedups: {changed or "the config has all of them"}'


def _where(names: Sequence[str], hook: str) -> Callable[[Config], None]:
    """Return a change that adds a hook to configs of models with a class of these names, or one derived from it."""

    def add(cfg: Config) -> None:
        if any(_derives_from(cfg, entry, names) for _, entry in mappings(cfg.get('model') or {})):
            _hook(hook)(cfg)

    return add


def _derives_from(cfg: Config, entry: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Return True if the class of a config's entry, or of the host that it gates, derives from one of these names."""
    kinds = [entry[key] for key in ('type', 'host') if isinstance(entry.get(key), (str, type))]
    with MODELS.switch_scope_and_registry(cfg.get('default_scope')) as registry:
        found = [registry.get(type_path(kind)) for kind in kinds]
    return any(base.__name__ in names for kind in found for base in getattr(kind, '__mro__', ()))


def _channels_last(cfg: Config) -> None:
    """Hand images to the backbone with their channels last; a model around a detector has no backbone of that name."""
    if 'backbone' in (cfg.get('model') or {}):
        _hook('ChannelsLastHook')(cfg)


def _hook(name: str, **options: Any) -> Callable[[Config], None]:
    """Return a change that adds a hook unless the config has it, and sets options of it."""

    def add(cfg: Config) -> None:
        hooks = list(cfg.get('custom_hooks') or [])
        if not any(type_name(hook) == name for hook in hooks):
            hooks.append(dict(type=f'mmgate.{name}'))
        cfg.custom_hooks = [dict(hook, **options) if type_name(hook) == name else hook for hook in hooks]

    return add


SPEEDUPS: dict[str, Callable[[Config], None]] = {
    # Parameter groups are merged, and the optimizer is fused, after the config's own constructor.
    'groups': lambda cfg: group_parameters(cfg, GroupedOptimWrapperConstructor),
    'matcher': _where(('DETRHead', 'Mask2FormerHead'), 'MatchOnceHook'),
    # Classes with deformable attention inside, or attention itself.
    'sampling': _where(('DeformableDETR', 'MSDeformAttnPixelDecoder', 'MultiScaleDeformableAttention'), 'SamplingHook'),
    'channels-last': _channels_last,
    'compile': _hook('CompileHook'),
    # CUDA graphs of what is compiled are replayed.
    'graphs': _hook('CompileHook', mode='reduce-overhead'),
}
# The changes that mmgate's configs have where they fit.
DEFAULTS = ('groups', 'matcher', 'sampling', 'channels-last')
