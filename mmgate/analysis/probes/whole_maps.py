"""Probes of the attentions over a whole map: agents, and the map K^T V of the linear ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmgate.analysis.probes.attention import Readings, handed, probes
from mmgate.layers.stripes import merge_stripes
from mmgate.ops.linear_attention import (
    EPS,
    focused_features,
    key_value_map,
    polarity_features,
    rank_augmented_keys,
)

Keys = Callable[[Any, Tensor, Tensor, tuple[int, int]], Tensor]


@probes('mmgate.AgentAttention', reads=('attention', 'agents', 'geometry'))
def agent(module: Any, **given: Any) -> Readings:
    """Read what the agents attend to, and the two softmaxes' product.

    ``agents`` are ``(B, H, n, h, w)``, in windows those of one number together. ``attention`` is ``(B, H, N, N)``, or
    ``(B nW, H, N, N)`` in windows; ``geometry`` says ``(height, width, 1)`` or ``(height, width, wh, ww, shift)``.
    """
    sides = module._square(given['x'].shape[1]) if given['hw_shape'] is None else tuple(given['hw_shape'])
    query, key, _, window = handed(module, '_mix', module, given)  # of windows, as they attend
    shift = [side // 2 if module.shifted else 0 for side in window]

    def maps() -> tuple[Tensor, Tensor]:
        biases = (0.0, 0.0) if module.an_bias is None else module.biases(window)
        q, k, a = (module.split_heads(t) for t in (query, key, module._agents(query, window)))
        first = (a @ k.transpose(-1, -2) * module.scale + biases[0]).softmax(-1)  # (B nW, H, n, N)
        return first, (q @ a.transpose(-1, -2) * (module.broadcast_scale or module.scale) + biases[1]).softmax(-1)

    def agents() -> Tensor:
        first = maps()[0][..., module.class_tokens :]
        if window == sides:
            return first.unflatten(-1, sides)
        merged = merge_stripes(first.flatten(1, 2).transpose(1, 2), sides, window)  # (B, h w, H n)
        on_map = merged.transpose(1, 2).unflatten(-1, sides).unflatten(1, first.shape[1:3])
        return on_map.roll(shift, (-2, -1))

    def attention() -> Tensor:
        first, second = maps()
        return second @ first

    geometry = [*sides, 1] if window == sides else [*sides, *window, shift[0]]
    return dict(attention=attention, agents=agents, geometry=lambda: torch.tensor(geometry))


def _focused(m: Any, k: Tensor) -> Tensor:
    return focused_features((k.relu() + EPS) / F.softplus(m.focus_scale), m.power)


def _rank_augmented(m: Any, q: Tensor, k: Tensor) -> Tensor:
    query, key = (F.elu(m.split_heads(t)) + 1 for t in (q, k))
    return rank_augmented_keys(query, key, scale=m.scale)


# features of the keys (B, H, N, d) by class; Hydra's heads have one channel, and so no map
_KEYS: dict[str, Keys] = {
    'EfficientAttention': lambda m, q, k, _: m.split_heads(k).softmax(-2) * k.shape[-2],
    'LinearAngularAttention': lambda m, q, k, _: F.normalize(m.split_heads(k), dim=-1),
    'EnhancedLinearAttention': lambda m, q, k, _: m.split_heads(k.relu()),
    'FocusedLinearAttention': lambda m, q, k, _: m.split_heads(_focused(m, k)),
    'InLineAttention': lambda m, q, k, _: m.split_heads(k - k.mean(-2, keepdim=True)),
    'MLLAAttention': lambda m, q, k, sides: m.split_heads(m.rotate(F.elu(k) + 1, sides)),
    'RALAAttention': lambda m, q, k, sides: m.rotate(_rank_augmented(m, q, k), sides, inclusive=True),
    'SAGAAttention': lambda m, q, k, _: m.split_heads(k),
}


@probes(*(f'mmgate.{name}' for name in _KEYS), reads=('gate_k', 'gate_v', 'gate_out', 'kv'))
def linear(module: Any, **given: Any) -> Readings:
    """Read the map ``K^T V / N`` ``(B, H, d, d)`` of keys' features and values, and the gates ``(B, N, C)``.

    SAGA's gates of keys and values are in the map, as it is used.
    """
    features = next(_KEYS[base.__name__] for base in type(module).__mro__ if base.__name__ in _KEYS)

    def gate(name: str) -> Tensor:
        return module.read_gate(name, given['x'])

    def kv() -> Tensor:
        _, query, key, value, sides = handed(module, 'attend', module, given)
        key = key * gate('gate_k') if 'gate_k' in module.gate_readings else key
        value = value * gate('gate_v') if 'gate_v' in module.gate_readings else value
        keys = features(module, query, key, sides)
        return key_value_map(keys, module.split_heads(value).to(keys.dtype))  # powers of 16 bits are in 32

    return dict(
        kv=kv,
        gate_k=lambda: gate('gate_k'),
        gate_v=lambda: gate('gate_v'),
        gate_out=lambda: gate('gate_out'),
    )


@probes('mmgate.PolaFormerAttention', reads=('gate_out', 'kv'))
def polaformer(module: Any, **given: Any) -> Readings:
    """Read the gate ``(B, N, C)`` and the map ``(B, H, 2 d, d)`` from the queries' two polarities to the values."""

    def kv() -> Tensor:
        _, _, key, value, _ = handed(module, 'attend', module, given)
        key = module.split_heads(key / F.softplus(module.focus_scale))
        keys = polarity_features(key, 1 + module.alpha * module.power.sigmoid())
        same, opposite = module.split_heads(value).to(keys[0].dtype).chunk(2, -1)
        maps = [key_value_map(torch.cat(k, -1), v) for k, v in ((keys, same), (keys[::-1], opposite))]
        return torch.cat(maps, -1)

    return dict(kv=kv, gate_out=lambda: module.read_gate('gate_out', given['x']))
