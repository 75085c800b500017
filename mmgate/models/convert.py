"""Turn published PVT and Swin checkpoints, vanilla and with agent attention, into those of our backbones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from mmdet.models.backbones.pvt import pvt_convert
from mmdet.models.backbones.swin import swin_converter
from torch import Tensor, nn

from .backbones import AgentPVT, AgentSwin
from .backbones.presets import OF_THE_ATTENTION, misfits

State = dict[str, Tensor]
# by what a published key ends with or starts with: not of a backbone for dense prediction
NOT_SHARED = ('.attn_mask', '.sr.weight', '.sr.bias', '.attn.norm.weight', '.attn.norm.bias', 'cls_token')
HEADS = ('head.', 'norm.', 'head_dist.')


def published_state(checkpoint: Mapping[str, Any]) -> State:
    """Return the tensors under ``model``, ``state_dict`` or at the top of a checkpoint; of a detector, its backbone's.

    Raises:
        ValueError: There are no tensors where they are expected.
    """
    state = checkpoint.get('state_dict', checkpoint.get('model', checkpoint))
    if not isinstance(state, Mapping) or not any(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(
            'The checkpoint holds no tensors under "model", "state_dict" or at its top; '
            f'its keys are {", ".join(map(str, list(checkpoint)[:8]))}.'
        )
    state = {key.removeprefix('module.'): value for key, value in state.items()}
    if any(key.startswith('backbone.') for key in state):
        state = {key.removeprefix('backbone.'): value for key, value in state.items() if key.startswith('backbone.')}
    return state


def convert(checkpoint: Mapping[str, Any]) -> State:
    """Return the state dict of an :class:`AgentPVT` or :class:`AgentSwin` that a published checkpoint makes.

    Agent attention checkpoints give every key; the output norms that an ImageNet Swin lacks start as the identity. A
    vanilla PVT or Swin gives what is shared, in mmdet's names, which our backbones understand in an ``init_cfg``: no
    attention biases, no depthwise convolution, no spatial reduction.

    Args:
        checkpoint: What ``torch.load`` returned.

    Raises:
        ValueError: It is neither PVT nor Swin, or a key is unknown, missing or of another shape; they are listed.
    """
    state = published_state(checkpoint)
    if any(key.startswith('block1.') for key in state):
        converted, model = _from_pvt(state)
    elif any(key.startswith('layers.0.blocks.') for key in state):
        converted, model = _from_swin(state)
    else:
        raise ValueError(
            'Neither the keys of PVT (block1.0...) nor those of Swin (layers.0.blocks.0...): '
            f'{", ".join(list(state)[:8])}.'
        )
    _check(converted, model)
    return converted


def _from_pvt(state: State) -> tuple[State, nn.Module]:
    wanted = _of_the_backbone(state)
    for key in wanted:
        if '.q.' in key and key.replace('.q.', '.kv.') not in wanted:
            raise ValueError(_listed([f'missing: {key.replace(".q.", ".kv.")}']))
    converted = dict(pvt_convert(wanted))
    depths = [_count(state, f'block{i}.') for i in range(1, 5)]
    agents = tuple(_agents(state, f'block{i}.') for i in range(1, 5))
    if any(agents) and not all(agents):
        raise ValueError(f'A PVT with agent attention in some stages only is not known; agents by stage: {agents}.')
    embeds = [state[f'patch_embed{i}.proj.weight'].shape[0] for i in range(1, 5)]
    # a vanilla checkpoint does not tell its heads; they have 64 channels in every published PVT
    heads = [state[f'block{i}.0.attn.an_bias'].shape[0] if agents[0] else embeds[i - 1] // 64 for i in range(1, 5)]
    side = round(state['pos_embed1'].shape[1] ** 0.5) * 4
    pretrained: dict[str, Any] = dict(pretrain_agent_nums=agents) if agents[0] else {}
    sizes: dict[str, Any] = dict(
        num_layers=depths, num_heads=heads, embed_dims=embeds[0] // heads[0], pretrain_img_size=side
    )
    return converted, AgentPVT(**sizes, **pretrained)


def _from_swin(state: State) -> tuple[State, nn.Module]:
    converted = {key.removeprefix('backbone.'): value for key, value in swin_converter(_of_the_backbone(state)).items()}
    depths = [_count(state, f'layers.{i}.blocks.') for i in range(4)]
    agents = [_agents(state, f'layers.{i}.blocks.') for i in range(4)]
    prefixes = [[f'stages.{i}.blocks.{j}.attn.' for j in range(depth)] for i, depth in enumerate(depths)]
    swapped = [[prefix for prefix in stage if f'{prefix}w_msa.an_bias' in converted] for stage in prefixes]
    for prefix in (prefix for stage in swapped for prefix in stage):
        old = prefix + 'w_msa.'
        for key in [key for key in converted if key.startswith(old)]:
            converted[prefix + key.removeprefix(old)] = converted.pop(key)
    width = state['patch_embed.proj.weight'].shape[0]
    sizes: dict[str, Any] = dict(depths=depths, embed_dims=width, num_heads=[width * 2**i // 32 for i in range(4)])
    blocks: dict[str, Any] = dict(
        blocks=[len(stage) for stage in swapped], pretrain_agent_nums=[number or 49 for number in agents]
    )
    model = AgentSwin('base' if width == 128 else 'tiny' if depths[2] == 6 else 'small', **sizes, **blocks)
    for key, value in model.state_dict().items():
        if key.startswith('norm'):  # of the outputs, which a classifier has not
            converted.setdefault(key, torch.full(value.shape, float(key.endswith('weight'))))
    return converted, model


def _of_the_backbone(state: State) -> State:
    return {key: value for key, value in state.items() if not key.endswith(NOT_SHARED) and not key.startswith(HEADS)}


def _check(converted: State, model: nn.Module) -> None:
    with_agents = any(key.endswith('.an_bias') for key in converted)
    faults = misfits(model, converted, may_miss=() if with_agents else OF_THE_ATTENTION)
    if faults:
        raise ValueError(_listed(faults))


def _listed(faults: list[str]) -> str:
    return 'The checkpoint does not convert (keys as our backbone names them):\n  ' + '\n  '.join(faults)


def _count(state: State, prefix: str) -> int:
    numbers = {key[len(prefix) :].split('.')[0] for key in state if key.startswith(prefix)}
    if sorted(numbers, key=int) != [str(i) for i in range(len(numbers))] or not numbers:
        raise ValueError(_listed([f'missing: blocks of {prefix}, there are {", ".join(sorted(numbers)) or "none"}']))
    return len(numbers)


def _agents(state: State, prefix: str) -> int:
    numbers = Counter(v.shape[1] for k, v in state.items() if k.startswith(prefix) and k.endswith('.an_bias'))
    return numbers.most_common(1)[0][0] if numbers else 0
