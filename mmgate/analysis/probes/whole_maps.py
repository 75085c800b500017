"""Readings of the attentions over a whole map: agents, and the map K^T V of the linear ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmgate.analysis.probes.attention import GATES, Given, Read, handed, reads
from mmgate.layers.stripes import merge_stripes
from mmgate.ops.linear_attention import (
    EPS,
    focused_features,
    key_value_map,
    polarity_features,
    rank_augmented_keys,
)

Size = tuple[int, int]


def _softmaxes(module: Any, given: Given) -> tuple[Tensor, Tensor, Size]:
    """Return those of agents ``(B nW, H, n, N)`` and of queries ``(B nW, H, N, n)``, and the window."""
    query, key, _, window = handed(module, '_mix', module, given)
    biases = (0.0, 0.0) if module.an_bias is None else module.biases(window)
    q, k, agents = (module.split_heads(t) for t in (query, key, module._agents(query, window)))
    first = agents @ k.transpose(-1, -2) * module.scale + biases[0]
    second = q @ agents.transpose(-1, -2) * (module.broadcast_scale or module.scale) + biases[1]
    return first.softmax(-1), second.softmax(-1), window


def _sides(module: Any, given: Given) -> Size:
    return module._square(given['x'].shape[1]) if given['hw_shape'] is None else tuple(given['hw_shape'])


def _agent_attention(module: Any, given: Given) -> Tensor:
    """Return the two softmaxes' product ``(B, H, N, N)``, or ``(B nW, H, N, N)`` in windows."""
    first, second, _ = _softmaxes(module, given)
    return second @ first


def _agents(module: Any, given: Given) -> Tensor:
    """Return what agents attend to ``(B, H, n, h, w)``, in windows those of one number together."""
    (first, _, window), sides = _softmaxes(module, given), _sides(module, given)
    first = first[..., module.class_tokens :]
    if window == sides:
        return first.unflatten(-1, sides)
    merged = merge_stripes(first.flatten(1, 2).transpose(1, 2), sides, window)  # (B, h w, H n)
    on_map = merged.transpose(1, 2).unflatten(-1, sides).unflatten(1, first.shape[1:3])
    return on_map.roll((window[0] // 2, window[1] // 2), (-2, -1)) if module.shifted else on_map


def _agent_geometry(module: Any, given: Given) -> Tensor:
    """Return ``(height, width, 1)`` or ``(height, width, window height, window width, shift)``."""
    sides, window = _sides(module, given), handed(module, '_mix', module, given)[-1]
    return torch.tensor([*sides, 1] if window == sides else [*sides, *window, window[0] // 2 * module.shifted])


reads('mmgate.AgentAttention', attention=_agent_attention, agents=_agents, geometry=_agent_geometry)


def _focused(m: Any, k: Tensor) -> Tensor:
    return focused_features((k.relu() + EPS) / F.softplus(m.focus_scale), m.power)


def _rank_augmented(m: Any, q: Tensor, k: Tensor) -> Tensor:
    query, key = (F.elu(m.split_heads(t)) + 1 for t in (q, k))
    return rank_augmented_keys(query, key, scale=m.scale)


# features of the keys (B, H, N, d) by class; Hydra's heads have one channel, and so no map
_KEYS: dict[str, Callable[[Any, Tensor, Tensor, Size], Tensor]] = {
    'EfficientAttention': lambda m, q, k, _: m.split_heads(k).softmax(-2) * k.shape[-2],
    'LinearAngularAttention': lambda m, q, k, _: F.normalize(m.split_heads(k), dim=-1),
    'EnhancedLinearAttention': lambda m, q, k, _: m.split_heads(k.relu()),
    'FocusedLinearAttention': lambda m, q, k, _: m.split_heads(_focused(m, k)),
    'InLineAttention': lambda m, q, k, _: m.split_heads(k - k.mean(-2, keepdim=True)),
    'MLLAAttention': lambda m, q, k, sides: m.split_heads(m.rotate(F.elu(k) + 1, sides)),
    'RALAAttention': lambda m, q, k, sides: m.rotate(_rank_augmented(m, q, k), sides, inclusive=True),
    'SAGAAttention': lambda m, q, k, _: m.split_heads(k),
}


def _kv_by(features: Callable[[Any, Tensor, Tensor, Size], Tensor]) -> Read:
    """Return how the map ``K^T V / N`` ``(B, H, d, d)`` is read, SAGA's gates of keys and values in it."""

    def kv(module: Any, given: Given) -> Tensor:
        x, query, key, value, sides = handed(module, 'attend', module, given)
        key = key * module.read_gate('gate_k', x) if 'gate_k' in module.gate_readings else key
        value = value * module.read_gate('gate_v', x) if 'gate_v' in module.gate_readings else value
        keys = features(module, query, key, sides)
        return key_value_map(keys, module.split_heads(value).to(keys.dtype))  # powers of 16 bits are in 32

    return kv


def _polarity_kv(module: Any, given: Given) -> Tensor:
    """Return the map ``(B, H, 2 d, d)`` from the queries' two polarities to the values."""
    _, _, key, value, _ = handed(module, 'attend', module, given)
    key = module.split_heads(key / F.softplus(module.focus_scale))
    keys = polarity_features(key, 1 + module.alpha * module.power.sigmoid())
    same, opposite = module.split_heads(value).to(keys[0].dtype).chunk(2, -1)
    maps = [key_value_map(torch.cat(k, -1), v) for k, v in ((keys, same), (keys[::-1], opposite))]
    return torch.cat(maps, -1)


def _gate(name: str) -> Read:
    return lambda module, given: module.read_gate(name, given['x'])  # (B, N, C)


for _name, _kv in {**{name: _kv_by(how) for name, how in _KEYS.items()}, 'PolaFormerAttention': _polarity_kv}.items():
    reads(f'mmgate.{_name}', kv=_kv, **{gate: _gate(gate) for gate in GATES[1:]})
