"""Probes of the attentions over a whole map: agents, and the map K^T V of the linear ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmgate.analysis.probes.attention import Readings, probes
from mmgate.layers.stripes import merge_stripes, split_stripes
from mmgate.ops.linear_attention import (
    EPS,
    focused_features,
    key_value_map,
    polarity_features,
    rank_augmented_keys,
)


def _sides(module: Any, x: Tensor, hw_shape: Any) -> tuple[int, int]:
    """Return height and width of the map, which a ViT does not name."""
    return module._square(x.shape[1]) if hw_shape is None else (int(hw_shape[0]), int(hw_shape[1]))


@probes('mmgate.AgentAttention', reads=('attention', 'agents', 'geometry'))
def agent(module: Any, x: Tensor, hw_shape: Any = None, **_: Any) -> Readings:
    """Read what the agents attend to, and the two softmaxes' product.

    ``agents`` are ``(B, H, n, h, w)``, in windows those of one number together. ``attention`` is ``(B, H, N, N)``, or
    ``(B nW, H, N, N)`` in windows; ``geometry`` says ``(height, width, 1)`` or ``(height, width, wh, ww, 0)``.
    """
    sides = _sides(module, x, hw_shape)
    side = module.window or max(sides)
    window = (min(side, sides[0]), min(side, sides[1]))

    def maps() -> tuple[Tensor, Tensor]:
        query, key, _ = module.qkv(x).chunk(3, -1)
        if window != sides:
            query, key = (split_stripes(t, sides, window) for t in (query, key))
        agents = module._agents(query, window)
        biases = (0.0, 0.0) if module.an_bias is None else module.biases(window)
        query, key, agents = (module.split_heads(t) for t in (query, key, agents))
        first = (agents @ key.transpose(-1, -2) * module.scale + biases[0]).softmax(-1)  # (B nW, H, n, N)
        return first, (query @ agents.transpose(-1, -2) * module.scale + biases[1]).softmax(-1)

    def agents() -> Tensor:
        first = maps()[0][..., module.class_tokens :]
        if window == sides:
            return first.unflatten(-1, sides)
        merged = merge_stripes(first.flatten(1, 2).transpose(1, 2), sides, window)  # (B, h w, H n)
        return merged.transpose(1, 2).unflatten(-1, sides).unflatten(1, first.shape[1:3])

    def attention() -> Tensor:
        first, second = maps()
        return second @ first

    geometry = [*sides, 1] if window == sides else [*sides, *window, 0]
    return dict(attention=attention, agents=agents, geometry=lambda: torch.tensor(geometry))


@probes('mmgate.SAGAAttention', reads=('gate_k', 'gate_v', 'gate_out', 'kv'))
def saga(module: Any, x: Tensor, hw_shape: Any = None, **_: Any) -> Readings:
    """Read the three gates ``(B, N, C)`` and the map ``K^T V / N`` ``(B, H, d, d)``, gated as it is used."""

    def kv() -> Tensor:
        _, key, value = _projected(module, x, _sides(module, x, hw_shape))
        key = key if module.gate_k is None else key * module.read_gate('gate_k', x)
        value = value if module.gate_v is None else value * module.read_gate('gate_v', x)
        return key_value_map(module.split_heads(key), module.split_heads(value))

    return dict(
        kv=kv,
        gate_k=lambda: module.read_gate('gate_k', x),
        gate_v=lambda: module.read_gate('gate_v', x),
        gate_out=lambda: module.read_gate('gate_out', x),
    )


def _projected(module: Any, x: Tensor, sides: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = module.qkv(x).chunk(3, -1)
    if module.position_encoding is not None:
        key = key + module.behind_class_token(module._resized_encoding(sides))
    return query, key, value


# features of the keys (B, H, N, d) by class; Hydra's heads have one channel, and so no map
_KEYS: dict[str, Callable[[Any, Tensor, Tensor, tuple[int, int]], Tensor]] = {
    'EfficientAttention': lambda m, q, k, _: m.split_heads(k).softmax(-2) * k.shape[-2],
    'LinearAngularAttention': lambda m, q, k, _: F.normalize(m.split_heads(k), dim=-1),
    'EnhancedLinearAttention': lambda m, q, k, _: m.split_heads(k.relu()),
    'FocusedLinearAttention': lambda m, q, k, _: m.split_heads(_focused(m, k)),
    'InLineAttention': lambda m, q, k, _: m.split_heads(k - k.mean(-2, keepdim=True)),
    'MLLAAttention': lambda m, q, k, sides: m.split_heads(m.rotate(F.elu(k) + 1, sides)),
    'RALAAttention': lambda m, q, k, sides: m.rotate(_rank_augmented(m, q, k), sides, inclusive=True),
}


def _focused(m: Any, k: Tensor) -> Tensor:
    return focused_features((k.relu() + EPS) / F.softplus(m.focus_scale), m.power)


def _rank_augmented(m: Any, q: Tensor, k: Tensor) -> Tensor:
    query, key = (F.elu(m.split_heads(t)) + 1 for t in (q, k))
    return rank_augmented_keys(query, key, scale=m.scale)


@probes(*(f'mmgate.{name}' for name in _KEYS), reads=('gate_out', 'kv'))
def linear(module: Any, x: Tensor, hw_shape: Any = None, **_: Any) -> Readings:
    """Read the map ``K^T V / N`` of keys' features and values, ``(B, H, d, d)``, and RALA's gate ``(B, N, C)``."""

    def kv() -> Tensor:
        sides = _sides(module, x, hw_shape)
        query, key, value = _projected(module, x, sides)
        features = next(_KEYS[base.__name__] for base in type(module).__mro__ if base.__name__ in _KEYS)
        keys = features(module, query, key, sides)
        return key_value_map(keys, module.split_heads(value).to(keys.dtype))  # powers of 16 bits are in 32

    return dict(kv=kv, gate_out=lambda: module.read_gate('gate_out', x))


@probes('mmgate.PolaFormerAttention', reads=('gate_out', 'kv'))
def polaformer(module: Any, x: Tensor, hw_shape: Any = None, **_: Any) -> Readings:
    """Read the gate ``(B, N, C)`` and the map ``(B, H, 2 d, d)`` from the queries' two polarities to the values."""

    def kv() -> Tensor:
        _, key, value = _projected(module, x, _sides(module, x, hw_shape))
        key = module.split_heads(key / F.softplus(module.focus_scale))
        keys = polarity_features(key, 1 + module.alpha * module.power.sigmoid())
        same, opposite = module.split_heads(value).to(keys[0].dtype).chunk(2, -1)
        maps = [key_value_map(torch.cat(k, -1), v) for k, v in ((keys, same), (keys[::-1], opposite))]
        return torch.cat(maps, -1)

    return dict(kv=kv, gate_out=lambda: module.read_gate('gate_out', x))
