"""CSwin, with agent attention and vanilla, written out plainly over state dicts in the authors' layout."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.published import agent_attention, linear, mlp, norm, random_agent, random_block, random_linear, random_norm

SMALL: dict[str, Any] = dict(depths=(1, 2, 2, 1), embed_dims=16, num_heads=(2, 2, 4, 4))
State = dict[str, Tensor]
EPS = 1e-5


def random_cswin(agents: bool, image: int = 224) -> State:
    """A state dict in the authors' names: agents in stages 1 and 2, or stripes 1 and 2 wide."""
    state: State = {}
    random_linear(state, 'stage1_conv_embed.0.', 16, (3, 7, 7))
    random_norm(state, 'stage1_conv_embed.2.', 16)
    for i, (depth, heads) in enumerate(zip(SMALL['depths'], SMALL['num_heads'], strict=True)):
        channels, side = 16 * 2**i, image // 4 // 2**i
        if i:
            random_linear(state, f'merge{i}.conv.', channels, (channels // 2, 3, 3))
            random_norm(state, f'merge{i}.norm.', channels)
        for j in range(depth):
            block = f'stage{i + 1}.{j}.'
            random_block(state, block, channels, projections={'qkv.': 3, 'proj.': 1})
            if agents and i < 2:
                random_agent(state, f'{block}attns.0.', channels, heads, (9, 16)[i], side)
                for part in ('weight', 'bias'):
                    state[f'{block}attns.0.get_v.{part}'] = state.pop(f'{block}attns.0.dwc.{part}')
                continue
            branches = 1 if i == 3 else 2
            for branch in range(branches):
                random_linear(state, f'{block}attns.{branch}.get_v.', channels // branches, (1, 3, 3))
    random_norm(state, 'norm.', 128)
    random_linear(state, 'head.', 10, (128,))
    return state


def stripe_attention(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor, heads: int) -> Tensor:
    """Attention and LePE in one stripe, ``(B, C, h, w)`` each."""
    batch, channels, height, width = v.shape
    local = F.conv2d(v, weight, bias, padding=1, groups=channels)
    q, k, v = (t.reshape(batch, heads, channels // heads, -1).transpose(-1, -2) for t in (q, k, v))
    out = (q @ k.mT / (channels // heads) ** 0.5).softmax(-1) @ v
    return out.transpose(-1, -2).reshape(batch, channels, height, width) + local


def published_cswin(state: State, image: Tensor, splits: tuple[int, ...]) -> Tensor:
    """The last map, normalised, by the authors' formulation, loops over stripes."""
    x = image
    for i, (depth, heads) in enumerate(zip(SMALL['depths'], SMALL['num_heads'], strict=True)):
        conv, after = ('stage1_conv_embed.0', 'stage1_conv_embed.2') if i == 0 else (f'merge{i}.conv', f'merge{i}.norm')
        stride, padding = (4, 2) if i == 0 else (2, 1)
        x = F.conv2d(x, state[f'{conv}.weight'], state[f'{conv}.bias'], stride, padding)
        height, width = x.shape[2:]
        x = norm(state, f'{after}.', x.flatten(2).transpose(1, 2), EPS)
        for j in range(depth):
            block = f'stage{i + 1}.{j}'
            y = norm(state, f'{block}.norm1.', x, EPS)
            if f'{block}.attns.0.an_bias' in state:
                own = {key.removeprefix(f'{block}.'): value for key, value in state.items() if key.startswith(block)}
                own = {key.replace('attns.0.get_v', 'dwc').replace('attns.0.', ''): v for key, v in own.items()}
                mixed = agent_attention(own, '', y, (height, width), heads, (9, 16)[i])
            else:
                qkv = linear(state, f'{block}.qkv.', y).transpose(1, 2).unflatten(-1, (height, width)).chunk(3, 1)
                branches = 1 if i == 3 else 2
                mixed_parts = []
                for branch in range(branches):
                    q, k, v = (t.chunk(branches, 1)[branch] for t in qkv)
                    weight = state[f'{block}.attns.{branch}.get_v.weight']
                    bias = state[f'{block}.attns.{branch}.get_v.bias']
                    axis, split = (3, splits[i]) if branch == 0 else (2, splits[i])
                    split = max(height, width) if branches == 1 else split
                    stripes = zip(*(t.split(split, axis) for t in (q, k, v)), strict=True)
                    outs = [stripe_attention(*stripe, weight, bias, heads // branches) for stripe in stripes]
                    mixed_parts.append(torch.cat(outs, axis))
                mixed = linear(state, f'{block}.proj.', torch.cat(mixed_parts, 1).flatten(2).transpose(1, 2))
            x = x + mixed
            x = x + mlp(state, f'{block}.mlp.', norm(state, f'{block}.norm2.', x, EPS))
        if i < 3:
            x = x.transpose(1, 2).unflatten(-1, (height, width))
    return norm(state, 'norm.', x, EPS).transpose(1, 2).unflatten(-1, (height, width))
