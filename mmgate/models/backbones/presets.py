"""Sizes by name, and what the backbones share: presets with overrides, and strict initialisation from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmengine.logging import print_log
from mmengine.runner.checkpoint import CheckpointLoader
from torch import Tensor, nn

from mmgate.layers.map_attention import MapAttention, rename_host_parameters

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
SAGA_SWIN_BLOCKS = {'tiny': (2, 2, 6, 0), 'small': (2, 2, 18, 0), 'base': (2, 2, 18, 0)}

# what a checkpoint of the vanilla backbone cannot have
OF_THE_ATTENTION = (
    *('.an_bias', '.na_bias', '.ah_bias', '.aw_bias', '.ha_bias', '.wa_bias', '.position_encoding'),
    *('.dwc.weight', '.dwc.bias', '.gate_k.weight', '.gate_k.bias', '.gate_v.weight', '.gate_v.bias'),
    *('.gate_out.weight', '.gate_out.bias'),
)


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


def load_pretrained(backbone: nn.Module, checkpoint: str) -> None:
    """Load a checkpoint whose keys are this backbone's, bare or with the prefix ``backbone.``.

    Only parameters that a vanilla backbone does not have may be missing; they keep their start. mmdet's names of the
    vanilla attention will do.

    Raises:
        ValueError: A key is unknown, missing or of another shape; the message says how to convert a checkpoint.
    """
    loaded = CheckpointLoader.load_checkpoint(checkpoint, map_location='cpu', logger='current')
    state = loaded.get('state_dict', loaded.get('model', loaded))
    if any(key.startswith('backbone.') for key in state):
        state = {key.removeprefix('backbone.'): value for key, value in state.items() if key.startswith('backbone.')}
    faults = misfits(backbone, state, may_miss=OF_THE_ATTENTION)
    if faults:
        listed = '\n  '.join(faults[:20] + [f'... and {len(faults) - 20} more'] * (len(faults) > 20))
        raise ValueError(
            f'{checkpoint} does not fit {type(backbone).__name__}:\n  {listed}\n'
            'Convert published checkpoints with tools/model_converters/agent_attention.py first.'
        )
    missing = backbone.load_state_dict(state, strict=False).missing_keys
    if missing:
        print_log(f'{checkpoint} leaves {len(missing)} parameters of the attention at their start', logger='current')


def misfits(backbone: nn.Module, state: dict[str, Tensor], may_miss: Sequence[str] = ()) -> list[str]:
    """Return what keeps ``state`` from filling ``backbone``: unknown and missing keys and other shapes.

    Keys of the vanilla attention count as those of the attention in its place.

    Args:
        backbone: The model.
        state: Its state dict to be.
        may_miss: Endings of keys that may be missing.
    """
    state = dict(state)
    for name, module in backbone.named_modules():
        if isinstance(module, MapAttention):
            rename_host_parameters(module, state, f'{name}.')
    own = backbone.state_dict()
    faults = [f'unknown: {key}' for key in state if key not in own]
    faults += [f'missing: {key}' for key in own if key not in state and not key.endswith(tuple(may_miss))]
    return faults + [
        f'shape: {key} {tuple(value.shape)}, expected {tuple(own[key].shape)}'
        for key, value in state.items()
        if key in own and value.shape != own[key].shape
    ]
