"""Changes to any config that make its training step faster: the option ``--speedups``.

- An optimizer with few parameter groups, fused, launches fewer kernels: ``parameter_groups.py``.
- Predictions of all layers and images are matched at once, with one wait for the GPU: ``mmgate/speed/matching``.
- Deformable attention without a gate samples by mmgate's operator where that is faster: ``mmgate/speed/sampling.py``.
- The backbone computes with channels last: ``mmgate/speed/hooks.py``, which has the hooks of the other two, as well.
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

HEADS = ('DETRHead', 'Mask2FormerHead')
# Classes with deformable attention inside, or attention itself.
SAMPLERS = ('DeformableDETR', 'MSDeformAttnPixelDecoder', 'MultiScaleDeformableAttention')


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


def _group(cfg: Config) -> None:
    """Merge parameter groups and fuse the optimizer, after the config's own constructor."""
    group_parameters(cfg, GroupedOptimWrapperConstructor)


def _match(cfg: Config) -> None:
    """Match once a step in DETR-like heads and Mask2Former's."""
    model: Any = cfg.get('model') or {}
    if any(_derives_from(cfg, entry, HEADS) for _, entry in mappings(model)):
        _hook('MatchOnceHook')(cfg)


def _derives_from(cfg: Config, entry: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Return True if the class of a config's entry, or of the host that it gates, derives from one of these names."""
    kinds = [entry[key] for key in ('type', 'host') if isinstance(entry.get(key), (str, type))]
    with MODELS.switch_scope_and_registry(cfg.get('default_scope')) as registry:
        found = [registry.get(type_path(kind)) for kind in kinds]
    return any(base.__name__ in names for kind in found for base in getattr(kind, '__mro__', ()))


def _sample(cfg: Config) -> None:
    """Let deformable attention without a gate sample by mmgate's operator."""
    model: Any = cfg.get('model') or {}
    if any(_derives_from(cfg, entry, SAMPLERS) for _, entry in mappings(model)):
        _hook('SamplingHook')(cfg)


def _channels_last(cfg: Config) -> None:
    """Hand images to the backbone with their channels last; a model around a detector has no backbone of that name."""
    if 'backbone' in (cfg.get('model') or {}):
        _hook('ChannelsLastHook')(cfg)


def _hook(name: str) -> Callable[[Config], None]:
    def add(cfg: Config) -> None:
        hooks = list(cfg.get('custom_hooks') or [])
        if not any(type_name(hook) == name for hook in hooks):
            cfg.custom_hooks = [*hooks, dict(type=f'mmgate.{name}')]

    return add


def _replay(cfg: Config) -> None:
    """Compile, and replay CUDA graphs of what is compiled."""
    _hook('CompileHook')(cfg)
    for hook in cfg.custom_hooks:
        if type_name(hook) == 'CompileHook':
            hook['mode'] = 'reduce-overhead'


SPEEDUPS: dict[str, Callable[[Config], None]] = {
    'groups': _group,
    'matcher': _match,
    'sampling': _sample,
    'channels-last': _channels_last,
    'compile': _hook('CompileHook'),
    'graphs': _replay,
}
# The changes that mmgate's configs have where they fit.
DEFAULTS = ('groups', 'matcher', 'sampling', 'channels-last')
