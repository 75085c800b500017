"""Sizes of backbones by name (``'tiny'``, ...), and the rules that gate the attention of every stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmgate.errors import ConfigError
from mmgate.gate import gate_of_type, gate_options
from mmgate.registry import MODELS

Options = Mapping[str, Any]
PRETRAIN_AGENTS = (9, 16, 49, 49)


def preset(presets: Mapping[str, Mapping[str, Any]], arch: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preset sizes called ``arch``, in which those ``overrides`` that are not None replace the preset's.

    Raises:
        ConfigError: An unknown ``arch``; the message lists the names there are.
    """
    if arch not in presets:
        raise ConfigError(f'arch={arch!r} is unknown; choose one of {", ".join(presets)} and override its fields.')
    return {**presets[arch], **{name: value for name, value in overrides.items() if value is not None}}


def check_stages(stages: int, **options: Any) -> None:
    """Raise ConfigError unless every option has one value for each of the ``stages``."""
    for name, values in options.items():
        if isinstance(values, int) or len(values) != stages:
            raise ConfigError(f'{name}={values!r} needs one value for each of the {stages} stages.')


def stage_rules(
    attention: Options | Sequence[Options] | None,
    kind: str | None,
    kind_agents: Sequence[int],
    stages: int,
    agent_nums: Sequence[int] | None,
    pretrain_agent_nums: Sequence[int] | None,
) -> list[dict[str, Any]]:
    """Return for every stage the rule that gates its attention, without a path; an empty list keeps it vanilla.

    ``attention`` has options for every stage, or a list of them, one a stage. ``kind`` is the type if they name none. A
    type with agents has ``kind_agents`` of them in pre-training by default.

    Raises:
        ConfigError: Not one for each stage, or without a type.
    """
    if attention is None and kind is None and agent_nums is None and pretrain_agent_nums is None:
        return []
    options = [attention or {}] * stages if attention is None or isinstance(attention, Mapping) else attention
    if len(options) != stages or not all(isinstance(one, Mapping) and (kind or 'type' in one) for one in options):
        raise ConfigError(
            f'attention must be a dict(type=..., ...) or one for each of the {stages} stages, got {attention!r}.'
        )
    rules: list[dict[str, Any]] = [dict(type=kind) for _ in range(stages)]
    for option, numbers in dict(pretrain_agent_num=pretrain_agent_nums, agent_num=agent_nums).items():
        if numbers is not None:
            check_stages(stages, **{f'{option}s': numbers})
            for rule, number in zip(rules, numbers, strict=True):
                rule.update({'agent_num': number, option: number})
    rules = [{**rule, **one} for rule, one in zip(rules, options, strict=True)]
    for rule, agents in zip(rules, kind_agents, strict=False):
        gate = gate_of_type(MODELS.get(rule['type']))
        if gate is not None and 'pretrain_agent_num' in gate_options(gate):
            rule.setdefault('agent_num', agents)
            rule.setdefault('pretrain_agent_num', agents)
    return rules
