"""Turn published checkpoints of PVT, Swin and DeiT, vanilla and with agent attention, into those of our backbones."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from .backbones import AgentPVT, AgentSwin
from .backbones.presets import OF_THE_ATTENTION
from .backbones.pretrained import DERIVED, OUTPUT_NORM, host_layout, misfits
from .checkpoint_file import State, tensors
from .deit import deit_backbone, is_deit


def convert(checkpoint: Any) -> State:
    """Return the state dict that a published checkpoint makes: of AgentPVT, AgentSwin or mmpretrain's ViT.

    The backbones read published layouts themselves; this is for who wants a file. Agent attention checkpoints give
    every key; the output norms that an ImageNet Swin lacks start as the identity. A vanilla PVT or Swin gives what is
    shared, in mmdet's names: no attention biases, no depthwise convolution, no spatial reduction.

    Args:
        checkpoint: What :func:`~mmgate.models.checkpoint_file.read_checkpoint` or ``torch.load`` returned.

    Raises:
        ValueError: It is neither PVT, Swin nor DeiT, or a key is unknown, missing or of another shape; they are listed.
    """
    state = tensors(checkpoint)
    if is_deit(state):
        return deit_backbone(state)
    try:
        converted = host_layout(state)
        if any(key.startswith('block1.') for key in state):
            model = _pvt(state)
        elif any(key.startswith('layers.0.blocks.') for key in state):
            model = _swin(state, converted)
        else:
            raise ValueError("the keys are mmdet's already; init_cfg takes the file as it is")
    except KeyError as error:
        raise ValueError(_listed([f'missing: {error.args[0]}'])) from None
    except ValueError as error:
        raise ValueError(_listed([str(error)])) from None
    with_agents = any(key.endswith('.an_bias') for key in converted)
    faults = misfits(model, converted, may_miss=() if with_agents else OF_THE_ATTENTION)
    if faults:
        raise ValueError(_listed(faults))
    for key, value in model.state_dict().items():
        if key.endswith(DERIVED) or OUTPUT_NORM.fullmatch(key):
            converted.setdefault(key, value)
    return converted


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
    return AgentSwin(**sizes, blocks=blocks, pretrain_agent_nums=agents)


def _listed(faults: list[str]) -> str:
    return 'The checkpoint does not convert (keys as our backbone names them):\n  ' + '\n  '.join(faults)


def _count(state: State, prefix: str) -> int:
    numbers = {key[len(prefix) :].split('.')[0] for key in state if key.startswith(prefix)}
    if sorted(numbers, key=int) != [str(i) for i in range(len(numbers))] or not numbers:
        raise ValueError(f'missing: blocks of {prefix}, there are {", ".join(sorted(numbers)) or "none"}')
    return len(numbers)


def _agents(state: State, prefix: str) -> int:
    numbers = Counter(v.shape[1] for k, v in state.items() if k.startswith(prefix) and k.endswith('.an_bias'))
    return numbers.most_common(1)[0][0] if numbers else 0
