"""Turn published checkpoints of PVT, Swin, CSwin and DeiT, vanilla or with agents, into those of our backbones."""

from __future__ import annotations

from collections import Counter
from math import isqrt
from typing import Any

from torch import nn

from mmgate.backbones import AgentCSwin, AgentPVT, AgentSwin
from mmgate.backbones.cswin_layout import cswin_layout, is_cswin
from mmgate.backbones.deit import deit_backbone, is_deit
from mmgate.backbones.fitting import DERIVED, OUTPUT_NORM, misfits
from mmgate.backbones.pretrained import host_layout
from mmgate.checkpoints.tensors import State, tensors
from mmgate.layers.base.init import gate_parameters


def convert(checkpoint: Any) -> State:
    """Return the state dict that a published checkpoint makes: of AgentPVT, AgentSwin, AgentCSwin or mmpretrain's ViT.

    The backbones read published layouts themselves; this is for who wants a file. Agent attention checkpoints give
    every key; the output norms that an ImageNet Swin lacks start as the identity. A vanilla PVT or Swin gives what is
    shared, in mmdet's names: no attention biases, no depthwise convolution, no spatial reduction; a vanilla CSwin gives
    all of an AgentCSwin without agents. Sizes, that of the images in pre-training too, are read from the tensors.

    Args:
        checkpoint: What :func:`~mmgate.checkpoints.tensors.read_checkpoint` or ``torch.load`` returned.

    Raises:
        ValueError: It is none of these, or a key is unknown, missing or of another shape; they are listed.
    """
    state = tensors(checkpoint)
    if is_deit(state):
        return deit_backbone(state)
    try:
        model, converted = _renamed(state)
    except KeyError as error:
        raise ValueError(_listed([f'missing: {error.args[0]}'])) from None
    except ValueError as error:
        raise ValueError(_listed([str(error)])) from None
    complete = is_cswin(state) or any(key.endswith('.an_bias') for key in converted)
    faults = misfits(model, converted, may_miss=() if complete else tuple(dict(gate_parameters(model))))
    if faults:
        raise ValueError(_listed(faults))
    for key, value in model.state_dict().items():
        if key.endswith(DERIVED) or OUTPUT_NORM.fullmatch(key):
            converted.setdefault(key, value)
    return converted


def _renamed(state: State) -> tuple[nn.Module, State]:
    """Return a backbone of the checkpoint's sizes, and the tensors by its names."""
    if is_cswin(state):
        model = _cswin(state)
        return model, cswin_layout(state, model.state_dict())
    converted = host_layout(state)
    if any(key.startswith('block1.') for key in state):
        return _pvt(state), converted
    if any(key.startswith('layers.0.blocks.') for key in state):
        return _swin(state, converted), converted
    raise ValueError("the keys are mmdet's already; init_cfg takes the file as it is")


def _pvt(state: State) -> nn.Module:
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
    return AgentPVT(**sizes, **pretrained)


def _swin(state: State, converted: State) -> nn.Module:
    depths = [_count(state, f'layers.{i}.blocks.') for i in range(4)]
    blocks = [
        sum(f'stages.{i}.blocks.{j}.attn.an_bias' in converted for j in range(depth)) for i, depth in enumerate(depths)
    ]
    agents = [_agents(state, f'layers.{i}.blocks.') or 49 for i in range(4)]
    width = state['patch_embed.proj.weight'].shape[0]
    sizes: dict[str, Any] = dict(depths=depths, embed_dims=width, num_heads=[width * 2**i // 32 for i in range(4)])
    sizes.update(pretrain_img_size=_image(state, [f'layers.{i}.blocks.' for i in range(4)]))
    for key, table in state.items():
        if key.endswith('.relative_position_bias_table'):
            sizes.update(window_size=(isqrt(len(table)) + 1) // 2)
    return AgentSwin(**sizes, blocks=blocks, pretrain_agent_nums=agents)


def _cswin(state: State) -> nn.Module:
    stages = [f'stage{i}.' for i in range(1, 5)]
    agents = [_agents(state, stage) or None for stage in stages]
    # without agents no tensor has the heads in its shape: two are one for each branch
    heads = [state[f'{stage}0.attns.0.an_bias'].shape[0] if n else 2 for stage, n in zip(stages, agents, strict=True)]
    branches = [f'{stage}0.attns.1.get_v.weight' in state for stage in stages]
    return AgentCSwin(
        depths=[_count(state, stage) for stage in stages],
        embed_dims=state['stage1_conv_embed.0.weight'].shape[0],
        num_heads=heads,
        agent_nums=agents,
        pretrain_agent_nums=agents,
        splits=[7 if two else None for two in branches],  # no tensor has the width of the stripes in its shape
        pretrain_img_size=_image(state, stages),
    )


def _listed(faults: list[str]) -> str:
    return 'The checkpoint does not convert (keys as our backbone names them):\n  ' + '\n  '.join(faults)


def _count(state: State, prefix: str) -> int:
    numbers = {key[len(prefix) :].split('.')[0] for key in state if key.startswith(prefix)}
    if sorted(numbers, key=int) != [str(i) for i in range(len(numbers))] or not numbers:
        raise ValueError(f'missing: blocks of {prefix}, there are {", ".join(sorted(numbers)) or "none"}')
    return len(numbers)


def _image(state: State, stages: list[str]) -> int:
    """Return the side of the images in pre-training, of which the biases' rows in the first stage with agents tell."""
    for i, prefix in enumerate(stages):
        for key, value in state.items():
            if key.startswith(prefix) and key.endswith('.ah_bias'):
                return value.shape[3] * 2 ** (i + 2)
    return 224


def _agents(state: State, prefix: str) -> int:
    numbers = Counter(v.shape[1] for k, v in state.items() if k.startswith(prefix) and k.endswith('.an_bias'))
    return numbers.most_common(1)[0][0] if numbers else 0
