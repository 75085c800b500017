"""Turn published checkpoints of PVT, Swin, CSwin and DeiT, vanilla or with agents, into those of our backbones."""

from __future__ import annotations

from collections import Counter
from math import isqrt
from typing import Any

from mmgate.backbones import AgentCSwin, AgentPVT, AgentSwin
from mmgate.backbones.weights import (
    DERIVED,
    LAST,
    OUTPUT_NORM,
    deit_layout,
    host_layout,
    is_cswin,
    is_deit,
    misfits,
)
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
        return deit_layout(state)
    try:
        model = _backbone_of(state)
        converted = model.rename(state)
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


def convert_classifier(checkpoint: Any) -> State:
    """Return the state dict of the ImageClassifier that ``configs/agent/classification`` builds of the same size.

    Agent-PVT, Agent-Swin and Agent-CSwin become ``backbone`` (its last stage alone has an output norm, Swin's final
    one) and ``head.fc``, and so does a vanilla CSwin, of an ``AgentCSwin`` without agents; DeiT, with agent attention
    or vanilla, mmpretrain's ViT and ``head.layers.head``.

    Args:
        checkpoint: What :func:`~mmgate.checkpoints.tensors.read_checkpoint` or ``torch.load`` returned.

    Raises:
        ValueError: It has no head, is a vanilla PVT or Swin, or does not convert; see :func:`convert`.
    """
    state = tensors(checkpoint)
    missing = [key for key in ('head.weight', 'head.bias') if key not in state]
    if missing:
        raise ValueError(f'The checkpoint is no classifier: it has no {", ".join(missing)}. Use --to backbone.')
    if not is_deit(state) and not is_cswin(state) and not any(key.endswith('.an_bias') for key in state):
        raise ValueError(
            'A vanilla PVT or Swin makes no classifier of ours, whose attention would be new; --to backbone gives what '
            'is shared, to start from.'
        )
    backbone, head = convert(state), 'head.layers.head' if is_deit(state) else 'head.fc'
    if not is_deit(state):
        backbone = {key: value for key, value in backbone.items() if not OUTPUT_NORM.fullmatch(key)}
        final = {f'norm{LAST}.{part}': state.get(f'norm.{part}') for part in ('weight', 'bias')}
        backbone.update({key: value for key, value in final.items() if value is not None})  # Agent-PVT has none
    return {
        **{f'backbone.{key}': value for key, value in backbone.items()},
        f'{head}.weight': state['head.weight'],
        f'{head}.bias': state['head.bias'],
    }


def _backbone_of(state: State) -> Any:
    """Return a backbone of the checkpoint's sizes."""
    if is_cswin(state):
        return _cswin(state)
    if any(key.startswith('block1.') for key in state):
        return _pvt(state)
    if any(key.startswith('layers.0.blocks.') for key in state):
        return _swin(state)
    host_layout(state)  # which says what the keys should be
    raise ValueError("the keys are mmdet's already; init_cfg takes the file as it is")


def _pvt(state: State) -> Any:
    stages = [f'block{i}.' for i in range(1, 5)]
    agents = [_agents(state, stage) for stage in stages]
    if any(agents) and not all(agents):
        raise ValueError(f'A PVT with agent attention in some stages only is not known; agents by stage: {agents}.')
    embeds = [state[f'patch_embed{i}.proj.weight'].shape[0] for i in range(1, 5)]
    # a vanilla checkpoint does not tell its heads; they have 64 channels in every published PVT
    heads = [
        state[f'{stage}0.attn.an_bias'].shape[0] if all(agents) else embed // 64
        for stage, embed in zip(stages, embeds, strict=True)
    ]
    return AgentPVT(
        num_layers=[_count(state, stage) for stage in stages],
        num_heads=heads,
        embed_dims=embeds[0] // heads[0],
        pretrain_img_size=isqrt(state['pos_embed1'].shape[1]) * 4,
        pretrain_agent_nums=agents if all(agents) else None,
    )


def _swin(state: State) -> Any:
    stages = [f'layers.{i}.blocks.' for i in range(4)]
    depths, width = [_count(state, stage) for stage in stages], state['patch_embed.proj.weight'].shape[0]
    tables = [len(table) for key, table in state.items() if key.endswith('.relative_position_bias_table')]
    return AgentSwin(
        depths=depths,
        embed_dims=width,
        num_heads=[width * 2**i // 32 for i in range(4)],
        blocks=[
            sum(f'{stage}{j}.attn.an_bias' in state for j in range(depth))
            for stage, depth in zip(stages, depths, strict=True)
        ],
        pretrain_agent_nums=[_agents(state, stage) or 49 for stage in stages],
        pretrain_img_size=_image(state, stages),
        window_size=(isqrt(tables[-1]) + 1) // 2 if tables else 7,
    )


def _cswin(state: State) -> Any:
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
