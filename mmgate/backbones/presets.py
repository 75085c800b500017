"""Sizes by name: presets with overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PRETRAIN_AGENTS = (9, 16, 49, 49)

PVT = {
    'tiny': dict(num_layers=(2, 2, 2, 2)),
    'small': dict(num_layers=(3, 4, 6, 3)),
    'medium': dict(num_layers=(3, 4, 18, 3)),
    'large': dict(num_layers=(3, 8, 27, 3)),
}
PVT_V2 = {
    'b0': dict(num_layers=(2, 2, 2, 2), embed_dims=32),
    'b1': dict(num_layers=(2, 2, 2, 2), embed_dims=64),
}
SWIN = {
    'tiny': dict(depths=(2, 2, 6, 2), embed_dims=96, num_heads=(3, 6, 12, 24)),
    'small': dict(depths=(2, 2, 18, 2), embed_dims=96, num_heads=(3, 6, 12, 24)),
    'base': dict(depths=(2, 2, 18, 2), embed_dims=128, num_heads=(4, 8, 16, 32)),
}
# how many blocks of each stage, from its first on, have the new attention; the others are Swin's own
AGENT_SWIN_BLOCKS = {'tiny': (2, 2, 6, 0), 'small': (2, 2, 0, 0), 'base': (2, 2, 2, 0)}
LINEAR_SWIN_BLOCKS = {'tiny': (2, 2, 0, 0), 'small': (2, 2, 0, 0), 'base': (2, 2, 0, 0)}
SAGA_SWIN_BLOCKS = {'tiny': (2, 2, 6, 0), 'small': (2, 2, 18, 0), 'base': (2, 2, 18, 0)}


def preset(presets: Mapping[str, Mapping[str, Any]], arch: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of ``arch`` with ``overrides``.

    Raises:
        ValueError: An unknown ``arch``; the message lists the names there are.
    """
    if arch not in presets:
        raise ValueError(f'arch={arch!r} is unknown; choose one of {", ".join(presets)} and override its fields.')
    return {**presets[arch], **overrides}


def per_stage(name: str, values: Any, stages: int) -> tuple[int, ...]:
    """Return ``values`` as a tuple of ``stages`` integers, or raise ValueError."""
    if isinstance(values, int) or len(values) != stages:
        raise ValueError(f'{name} needs one number for each of the {stages} stages, got {values!r}.')
    return tuple(int(value) for value in values)


def agent_rules(
    map_sizes: Sequence[tuple[int, int]],
    agent_nums: Sequence[int] | None,
    pretrain_agent_nums: Sequence[int],
    attention: Mapping[str, Any] | None,
) -> list[dict[str, Any]]:
    """Return agent attention for each stage of a backbone, as a rule of swaps names it.

    Args:
        map_sizes: Height and width of each stage's map in pre-training.
        agent_nums: Agent tokens of each stage; those of pre-training by default.
        pretrain_agent_nums: Agent tokens of each stage in pre-training.
        attention: Options for every stage.

    Raises:
        ValueError: Not one number for each stage.
    """
    stages = len(map_sizes)
    pretrained = per_stage('pretrain_agent_nums', pretrain_agent_nums, stages)
    numbers = per_stage('agent_nums', pretrained if agent_nums is None else agent_nums, stages)
    return [
        dict(type='AgentAttention', map_size=size, agent_num=number, pretrain_agent_num=pretrain, **(attention or {}))
        for size, number, pretrain in zip(map_sizes, numbers, pretrained, strict=True)
    ]


def no_attention_dropout(fields: Mapping[str, Any]) -> None:
    """Raise ValueError if attention weights are to be dropped that a linear attention does not have."""
    rate = fields.get('attn_drop_rate', 0.0)
    if rate:
        raise ValueError(
            f'attn_drop_rate={rate}: SAGA is linear and has no attention weights to drop; leave it at 0 and use '
            'drop_rate or drop_path_rate.'
        )
