"""Compare the options of a model's gates with those that a checkpoint was trained with, which its config tells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from mmgate.adapter import gated_modules, record_of
from mmgate.checkpoints.plain_config import plain_values
from mmgate.errors import ConfigError, listed
from mmgate.gate import GATE_NAME, gate_options, registered_gates
from mmgate.registry import MODELS
from mmgate.rules import path_regex
from mmgate.wrappers import unwrap_model, without_wrappers

from .config_file import mappings, type_name

# Options of the machine, of the start, and of the size of images, with which a trained gate computes the same; and
# those that the shapes of its tensors tell.
OF_NO_CONSEQUENCE = ('backend', 'init', 'image_size', 'map_size', 'pretrain_agent_num', 'dwc', 'gate_channels')


def other_options(model: nn.Module, checkpoint: Mapping[str, Any], cfg: Any = None) -> str:
    """Return the options in which the gates of a model differ from those that a checkpoint was trained with.

    Options that are left out have their defaults. Only gates whose tensors are all in the checkpoint are compared; of a
    checkpoint without a config, or whose gates came from a file, there is nothing to compare.

    Args:
        model: The gated model.
        checkpoint: Content of the checkpoint.
        cfg: The ``model`` of its config, for gates that it names as the type of a layer.

    Returns:
        A text such as ``gml='product' in the checkpoint, 'sum' here (encoder.layers.0.self_attn and 5 more)``; empty if
        there is no difference.
    """
    model = unwrap_model(model)
    entries = _entries(checkpoint)
    rules = [rule for entry in entries.values() if type_name(entry) == 'Gated' for rule in _rules(entry)]
    names = set(map(without_wrappers, checkpoint.get('state_dict', checkpoint)))
    tensors = list(map(without_wrappers, model.state_dict()))
    found: dict[str, list[str]] = {}
    for name, module in gated_modules(model):
        record = record_of(module)
        prefix = f'{without_wrappers(name)}.{GATE_NAME}.'
        if record is None or not all(key in names for key in tensors if key.startswith(prefix)):
            continue
        chosen = record.chosen_name(record.name)
        # Attention that a type has built has no name: its options are in the config's own entry, see below.
        placed = [rule for rule in rules if chosen and _names(rule, chosen)]
        differences = [list(_differences(rule, record.rule)) for rule in placed]
        # Parts that are gated by themselves share paths such as blocks.*.attn: the rule that fits best is the module's.
        for line in min(differences, key=len, default=()):
            found.setdefault(line, []).append(name)
    for where, entry in mappings(cfg or {}):
        there = entries.get(where, {})
        if 'path' not in entry and _gate_type(entry) is _gate_type(there):
            for line in _differences(there, entry):
                found.setdefault(line, []).append(where.lstrip('.'))
    return '; '.join(f'{line} ({listed(where, 1)})' for line, where in found.items())


def _entries(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return each dict of the ``model`` in a checkpoint's config by its path; none if no config can be read."""
    meta = checkpoint.get('meta')
    text = meta.get('cfg') if isinstance(meta, Mapping) else None
    try:
        return dict(mappings(plain_values(text).get('model'))) if isinstance(text, str) else {}
    except ValueError:
        return {}


def _rules(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    given = entry.get('attention') or ()
    rules = [given] if isinstance(given, Mapping) else given
    return [rule for rule in rules if isinstance(rule, Mapping) and {'path', 'type'} <= set(rule)]


def _names(rule: Mapping[str, Any], module: str) -> bool:
    """Return True if a checkpoint's rule names a module; older versions took paths that are refused now."""
    paths = [rule['path']] if isinstance(rule['path'], str) else rule['path']
    try:
        return any(path_regex(path).fullmatch(module) for path in paths)
    except ConfigError:
        return False


def _gate_type(entry: Mapping[str, Any]) -> type | None:
    """Return the class that an entry's ``type`` names, of those that have a gate; nothing is imported."""
    name = type_name(entry)
    named = MODELS.module_dict.get(name)
    return next((one for one in registered_gates() if one is named or one.__name__ == name), None)


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """Yield each difference of two rules, or of two layers, that trained gates compute by."""
    gate_type, other = _gate_type(here), _gate_type(there)
    # A gate of the user's own may be registered elsewhere, and by another name.
    if gate_type is None or other is None:
        return
    if gate_type is not other:
        yield f'type={other.__name__!r} in the checkpoint, {gate_type.__name__!r} here'
        return
    for name, option in gate_options(gate_type).items():
        before, now = (_plain(rule.get(name, option.default)) for rule in (there, here))
        if name not in OF_NO_CONSEQUENCE and before != now:
            yield f'{name}={before!r} in the checkpoint, {now!r} here'


def _plain(value: Any) -> Any:
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value
