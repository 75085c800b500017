"""The published agent attention models written out plainly, over state dicts in the authors' layout.

What the converter and the fast layers are held against: loops over stages, biases resized as whole maps.
"""

from __future__ import annotations

from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor

State = dict[str, Tensor]


def agent_attention(s: State, p: str, x: Tensor, hw: tuple[int, int], heads: int, agents: int) -> Tensor:
    """Agent attention with every intermediate at full size; ``p`` is the prefix of its parameters.

    A token before those of the map is a class token, with biases of its own.
    """
    b, c, n = len(x), x.shape[-1], hw[0] * hw[1]
    before = x.shape[1] - n
    if p + 'q.weight' in s:
        q, (k, v) = linear(s, p + 'q.', x), linear(s, p + 'kv.', x).chunk(2, -1)
    else:
        q, k, v = linear(s, p + 'qkv.', x).chunk(3, -1)
    side, small = isqrt(agents), isqrt(s[p + 'an_bias'].shape[1])

    def image(t: Tensor) -> Tensor:
        return t[:, before:].transpose(1, 2).reshape(b, c, *hw)

    def split(t: Tensor) -> Tensor:
        return t.reshape(b, -1, heads, c // heads).transpose(1, 2)

    def resized(bias: Tensor) -> Tensor:
        """(heads, agents, h, w) of pre-training to (heads, H W, agents)."""
        bias = F.interpolate(bias, size=hw, mode='bilinear').reshape(heads, small, small, n).permute(0, 3, 1, 2)
        return F.interpolate(bias, size=(side, side), mode='bilinear').reshape(heads, n, agents)

    tokens = F.adaptive_avg_pool2d(image(q), side).flatten(2).transpose(1, 2)
    q, k, values, tokens = split(q), split(k), split(v), split(tokens)
    scale = (c // heads) ** -0.5
    first = resized(s[p + 'an_bias']) + resized((s[p + 'ah_bias'] + s[p + 'aw_bias'])[0])
    second = resized(s[p + 'na_bias']) + resized((s[p + 'ha_bias'] + s[p + 'wa_bias'])[0].permute(0, 3, 1, 2))
    if before:
        first = torch.cat([s[p + 'ac_bias'][0].transpose(1, 2), first], 1)
        second = torch.cat([s[p + 'ca_bias'][0], second], 1)
    gathered = (tokens * scale @ k.transpose(-1, -2) + first.transpose(1, 2)).softmax(-1) @ values
    out = (q * scale @ tokens.transpose(-1, -2) + second).softmax(-1) @ gathered
    out = out.transpose(1, 2).reshape(b, -1, c)
    local = F.conv2d(image(v), s[p + 'dwc.weight'], s[p + 'dwc.bias'], padding=1, groups=c)
    out[:, before:] += local.flatten(2).transpose(1, 2)
    return linear(s, p + 'proj.', out)


def attention(s: State, p: str, x: Tensor, heads: int, bias: Tensor | float = 0.0) -> Tensor:
    """Softmax attention over tokens (B, N, C)."""
    b, _, c = x.shape
    q, k, v = (t.reshape(b, -1, heads, c // heads).transpose(1, 2) for t in linear(s, p + 'qkv.', x).chunk(3, -1))
    out = (q * (c // heads) ** -0.5 @ k.transpose(-1, -2) + bias).softmax(-1) @ v
    return linear(s, p + 'proj.', out.transpose(1, 2).reshape(b, -1, c))


def linear(s: State, p: str, x: Tensor) -> Tensor:
    return F.linear(x, s[p + 'weight'], s[p + 'bias'])


def norm(s: State, p: str, x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], s[p + 'weight'], s[p + 'bias'], eps)


def mlp(s: State, p: str, x: Tensor) -> Tensor:
    return linear(s, p + 'fc2.', F.gelu(linear(s, p + 'fc1.', x)))


def agent_pvt(s: State, x: Tensor, depths: list[int], agents: tuple[int, ...]) -> list[Tensor]:
    maps = []
    for stage, (depth, number) in enumerate(zip(depths, agents, strict=True), 1):
        p = f'patch_embed{stage}.'
        x = F.conv2d(x, s[p + 'proj.weight'], s[p + 'proj.bias'], stride=s[p + 'proj.weight'].shape[-1])
        hw = x.shape[2], x.shape[3]
        x = norm(s, p + 'norm.', x.flatten(2).transpose(1, 2), 1e-5)
        position = s[f'pos_embed{stage}']
        side = isqrt(position.shape[1])
        position = position.reshape(1, side, side, -1).permute(0, 3, 1, 2)
        x = x + F.interpolate(position, size=hw, mode='bilinear').flatten(2).transpose(1, 2)
        for block in range(depth):
            p = f'block{stage}.{block}.'
            heads = s[p + 'attn.an_bias'].shape[0]
            x = x + agent_attention(s, p + 'attn.', norm(s, p + 'norm1.', x, 1e-6), hw, heads, number)
            x = x + mlp(s, p + 'mlp.', norm(s, p + 'norm2.', x, 1e-6))
        x = x.transpose(1, 2).reshape(len(x), -1, *hw)
        maps.append(x)
    return maps


def relative_index(size: int) -> Tensor:
    """The entry of a window's table for each pair of its tokens."""
    offsets = torch.arange(size)
    rows, columns = (g.flatten() for g in torch.meshgrid(offsets, offsets, indexing='ij'))
    return (rows[:, None] - rows + size - 1) * (2 * size - 1) + columns[:, None] - columns + size - 1


def _windows(s: State, p: str, x: Tensor, heads: int, shift: int, size: int) -> Tensor:
    """Shifted window attention of maps (B, H, W, C), one window after the other."""
    b, height, width, c = x.shape
    x = F.pad(x, (0, 0, 0, -width % size, 0, -height % size))
    region = torch.zeros(x.shape[1:3])
    if shift:
        x = x.roll((-shift, -shift), (1, 2))
        for i, rows in enumerate((slice(-size, -shift), slice(-shift, None)), 1):
            region[rows] += i
        for i, columns in enumerate((slice(-size, -shift), slice(-shift, None)), 1):
            region[:, columns] += 3 * i
    bias = s[p + 'relative_position_bias_table'][relative_index(size)].permute(2, 0, 1)
    out = torch.empty_like(x)
    for top in range(0, x.shape[1], size):
        for left in range(0, x.shape[2], size):
            window = (slice(None), slice(top, top + size), slice(left, left + size))
            tokens = x[window].reshape(b, size * size, c)
            parts = region[window[1:]].flatten()
            mask = -100.0 * (parts[:, None] != parts).float()
            out[window] = attention(s, p, tokens, heads, bias + mask).reshape(b, size, size, c)
    return out.roll((shift, shift), (1, 2))[:, :height, :width]


def agent_swin(
    s: State, x: Tensor, depths: list[int], agents: tuple[int, ...], window: int = 7, dense: bool = True
) -> list[Tensor]:
    """Normalised maps; the authors' classifiers do not shift where one window holds the map, their detectors do."""
    maps = []
    x = F.pad(x, (0, -x.shape[3] % 4, 0, -x.shape[2] % 4))
    x = F.conv2d(x, s['patch_embed.proj.weight'], s['patch_embed.proj.bias'], stride=4)
    hw = x.shape[2], x.shape[3]
    x = norm(s, 'patch_embed.norm.', x.flatten(2).transpose(1, 2), 1e-5)
    for stage, (depth, number) in enumerate(zip(depths, agents, strict=True)):
        for block in range(depth):
            p = f'layers.{stage}.blocks.{block}.'
            y = norm(s, p + 'norm1.', x, 1e-5)
            heads = x.shape[-1] // 32
            shift = window // 2 * (block % 2) if dense or min(hw) > window else 0
            if p + 'attn.an_bias' in s:
                y = agent_attention(s, p + 'attn.', y, hw, heads, number)
            else:
                y = _windows(s, p + 'attn.', y.unflatten(1, hw), heads, shift, window).flatten(1, 2)
            x = x + y
            x = x + mlp(s, p + 'mlp.', norm(s, p + 'norm2.', x, 1e-5))
        out = norm(s, f'norm{stage}.', x, 1e-5) if f'norm{stage}.weight' in s else F.layer_norm(x, x.shape[-1:])
        maps.append(out.transpose(1, 2).reshape(len(x), -1, *hw))
        if stage < len(depths) - 1:
            p = f'layers.{stage}.downsample.'
            x = F.pad(x.unflatten(1, hw), (0, 0, 0, hw[1] % 2, 0, hw[0] % 2))
            x = torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)
            hw = x.shape[1], x.shape[2]
            x = F.linear(norm(s, p + 'norm.', x.flatten(1, 2), 1e-5), s[p + 'reduction.weight'])
    return maps


def random_pvt(depths: list[int], agents: tuple[int, ...], classifier: bool = True) -> State:
    """A checkpoint of Agent-PVT's key layout with random numbers; vanilla PVT's where ``agents`` is empty."""
    s: State = {}
    heads, ratios, dims = (1, 2, 5, 8), (8, 8, 4, 4), (64, 128, 320, 512)
    previous = 3
    for i, depth in enumerate(depths):
        c, side, kernel = dims[i], 56 >> i, 2 if i else 4
        p = f'patch_embed{i + 1}.'
        random_linear(s, p + 'proj.', c, (previous, kernel, kernel))
        random_norm(s, p + 'norm.', c)
        s[f'pos_embed{i + 1}'] = 0.1 * torch.randn(1, side * side + (i == 3 and not agents), c)
        for j in range(depth):
            p = f'block{i + 1}.{j}.'
            random_block(s, p, c, ratios[i], {'attn.q.': 1, 'attn.kv.': 2, 'attn.proj.': 1})
            if agents:
                random_agent(s, p + 'attn.', c, heads[i], agents[i], side)
            elif i < 3:
                random_linear(s, p + 'attn.sr.', c, (c, 8 >> i, 8 >> i))
                random_norm(s, p + 'attn.norm.', c)
        previous = c
    if not agents:
        s['cls_token'] = torch.randn(1, 1, 512)
        random_norm(s, 'norm.', 512)
    if classifier:
        random_linear(s, 'head.', 1000, (512,))
    return s


def random_swin(
    depths: list[int],
    blocks: tuple[int, ...],
    agents: tuple[int, ...],
    classifier: bool = True,
    image: int = 224,
    window: int = 7,
) -> State:
    """A checkpoint of Agent-Swin's key layout with random numbers; vanilla Swin's where ``blocks`` are all 0."""
    s: State = {}
    random_linear(s, 'patch_embed.proj.', 96, (3, 4, 4))
    random_norm(s, 'patch_embed.norm.', 96)
    for i, depth in enumerate(depths):
        c, heads = 96 << i, 3 << i
        for j in range(depth):
            p = f'layers.{i}.blocks.{j}.'
            random_block(s, p, c)
            if j < blocks[i]:
                random_agent(s, p + 'attn.', c, heads, agents[i], image // 4 >> i)
            else:
                span = 2 * window - 1
                s[p + 'attn.relative_position_bias_table'] = 0.1 * torch.randn(span**2, heads)
                s[p + 'attn.relative_position_index'] = relative_index(window)
                if classifier and j % 2 and i < 3:
                    s[p + 'attn_mask'] = torch.zeros(4, window**2, window**2)
        if i < len(depths) - 1:
            s[f'layers.{i}.downsample.reduction.weight'] = torch.randn(2 * c, 4 * c) / (4 * c) ** 0.5
            random_norm(s, f'layers.{i}.downsample.norm.', 4 * c)
        if not classifier:
            random_norm(s, f'norm{i}.', c)
    if classifier:
        random_norm(s, 'norm.', 768)
        random_linear(s, 'head.', 1000, (768,))
    return s


def random_block(s: State, p: str, c: int, ratio: int = 4, projections: dict[str, int] | None = None) -> None:
    """Norms, feed-forward network and, by name, projections of so many times ``c`` channels."""
    random_norm(s, p + 'norm1.', c)
    random_norm(s, p + 'norm2.', c)
    random_linear(s, p + 'mlp.fc1.', ratio * c, (c,))
    random_linear(s, p + 'mlp.fc2.', c, (ratio * c,))
    for name, times in (projections or {'attn.qkv.': 3, 'attn.proj.': 1}).items():
        random_linear(s, p + name, times * c, (c,))


def random_linear(s: State, p: str, out: int, rest: tuple[int, ...]) -> None:
    fan = torch.Size(rest).numel()
    s[p + 'weight'], s[p + 'bias'] = torch.randn(out, *rest) / fan**0.5, 0.1 * torch.randn(out)


def random_norm(s: State, p: str, c: int) -> None:
    s[p + 'weight'], s[p + 'bias'] = 1 + 0.1 * torch.randn(c), 0.1 * torch.randn(c)


def random_agent(s: State, p: str, c: int, heads: int, n: int, side: int) -> None:
    for name in ('an_bias', 'na_bias'):
        s[p + name] = torch.randn(heads, n, 7, 7)
    s[p + 'ah_bias'], s[p + 'aw_bias'] = torch.randn(1, heads, n, side, 1), torch.randn(1, heads, n, 1, side)
    s[p + 'ha_bias'], s[p + 'wa_bias'] = torch.randn(1, heads, side, 1, n), torch.randn(1, heads, 1, side, n)
    random_linear(s, p + 'dwc.', c, (1, 3, 3))


def agent_deit(s: State, x: Tensor, heads: int) -> Tensor:
    """Logits of DeiT with a class token, with agent attention in the blocks that have its biases."""
    x = F.conv2d(x, s['patch_embed.proj.weight'], s['patch_embed.proj.bias'], stride=16)
    b, _, height, width = x.shape
    x = torch.cat([s['cls_token'].expand(b, -1, -1), x.flatten(2).transpose(1, 2)], 1) + s['pos_embed']
    block = 0
    while (p := f'blocks.{block}.') + 'norm1.weight' in s:
        y = norm(s, p + 'norm1.', x, 1e-6)
        if p + 'attn.an_bias' in s:
            agents = s[p + 'attn.an_bias'].shape[1]
            x = x + agent_attention(s, p + 'attn.', y, (height, width), heads, agents)
        else:
            x = x + attention(s, p + 'attn.', y, heads)
        x = x + mlp(s, p + 'mlp.', norm(s, p + 'norm2.', x, 1e-6))
        block += 1
    return linear(s, 'head.', norm(s, 'norm.', x, 1e-6)[:, 0])


def pooled_logits(s: State, last: Tensor) -> Tensor:
    """The head of Agent-PVT, without a norm, and of Agent-Swin, over the last of their maps as they are given here."""
    tokens = last.flatten(2).transpose(1, 2)
    if 'norm.weight' in s:  # the map is normalised already, without scale and shift
        tokens = tokens * s['norm.weight'] + s['norm.bias']
    return linear(s, 'head.', tokens.mean(1))


def random_deit(depth: int, agents: int, blocks: int, c: int = 192, heads: int = 3) -> State:
    """A checkpoint of Agent-DeiT's key layout with random numbers; ``agents`` in the first ``blocks`` blocks."""
    s: State = {'cls_token': torch.randn(1, 1, c), 'pos_embed': 0.1 * torch.randn(1, 197, c)}
    random_linear(s, 'patch_embed.proj.', c, (3, 16, 16))
    for i in range(depth):
        p = f'blocks.{i}.'
        random_block(s, p, c)
        if i < blocks:
            random_agent(s, p + 'attn.', c, heads, agents, 14)
            s[p + 'attn.ac_bias'] = torch.randn(1, heads, agents, 1)
            s[p + 'attn.ca_bias'] = torch.randn(1, heads, 1, agents)
    random_norm(s, 'norm.', c)
    random_linear(s, 'head.', 1000, (c,))
    return s
