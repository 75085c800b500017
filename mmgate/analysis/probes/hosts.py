"""Probes of hosts that compute their attention themselves, with a gate in it or without, and of where it lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mmgate.analysis.probes.attention import Probe, Readings, handed, probes


def gate_in_host(name: str, host: Any, **given: Any) -> Readings:
    """Read weights ``(B, H, N, M)`` and gate of a gate without projections, which ``host`` holds as ``name``.

    A row whose keys are all masked reads as uniform.
    """
    gate = getattr(host, name)
    query, key, _, inputs, bias = handed(gate, 'attend', host, given)
    return dict(
        attention=lambda: gate.attention_map(query, key, inputs, bias), gate=lambda: gate.read_gate('gate', *inputs)
    )


def _before_dropout(module: Any, given: dict[str, Any]) -> Tensor:
    """Return the attention weights that a host hands to its ``attn_drop``, ``(B, H, N, M)``."""
    return handed(module.attn_drop, 'forward', module, given)[0]


@probes('mmgate.GatedWindowMSA', reads=('gate', 'attention'))
def gated_windows(module: Any, **given: Any) -> Readings:
    """Read the weights ``(B nW, H, N, N)`` in Swin's windows and the gate."""
    return gate_in_host('attn', module, **given)


@probes(
    *('mmdet.WindowMSA', 'mmseg.WindowMSA', 'mmpretrain.WindowMSA', 'mmpretrain.WindowMSAV2'),
    *('mmseg.BEiTAttention', 'timm.WindowAttentionGlobal'),
    reads=('attention',),
)
def before_dropout(module: Any, **given: Any) -> Readings:
    """Read the weights ``(B, H, N, N)`` of BEiT and MAE, ``(B nW, H, N, N)`` in the windows of Swin and GCViT."""
    return dict(attention=lambda: _before_dropout(module, given))


@probes('mmdet.ConditionalAttention', reads=('attention',))
def conditional(module: Any, **given: Any) -> Readings:
    """Read the weights ``(B, H, N, M)`` of Conditional DETR and DAB-DETR."""
    return dict(attention=lambda: _before_dropout(module, given).unflatten(0, (-1, module.num_heads)))


@probes('mmseg.LocallyGroupedSelfAttention', reads=('attention', 'geometry'))
def locally_grouped(module: Any, **given: Any) -> Readings:
    """Read the weights ``(B nW, H, N, N)`` in Twins' windows and where they lie, ``(height, width, window, 0)``."""
    return dict(
        attention=lambda: _before_dropout(module, given).flatten(0, 1),
        geometry=lambda: torch.tensor([*given['hw_shape'], module.window_size, 0]),
    )


@probes('mmpretrain.LeAttention', reads=('attention',))
def le_attention(module: Any, x: Tensor) -> Readings:
    """Read the weights ``(B nW, H, N, N)`` in TinyViT's windows."""

    def attention() -> Tensor:
        joint = module.qkv(module.norm(x)).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
        query, key, _ = joint.split([module.key_dim, module.key_dim, module.d], -1)
        logits = query @ key.transpose(-1, -2) * module.scale
        return (logits + module.attention_biases[:, module.attention_bias_idxs]).softmax(-1)

    return dict(attention=attention)


@probes('mmpretrain.MultiheadAttention', reads=('attention',))
def tokens(module: Any, x: Tensor) -> Readings:
    """Read the weights ``(B, H, N, N)`` of mmpretrain's vision transformers."""

    def attention() -> Tensor:
        query, key, _ = module.qkv(x).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
        # a qk_scale is handed on as what the host's product divides by
        given = getattr(module.scaled_dot_product_attention, 'keywords', {}).get('scale')
        return (query / (query.shape[-1] ** 0.5 if given is None else given) @ key.transpose(-1, -2)).softmax(-1)

    return dict(attention=attention)


def _shifted_windows(module: Any, given: Mapping[str, Any]) -> list[int]:
    size = given['hw_shape']
    shift = module.shift_at(size) if hasattr(module, 'shift_at') else module.shift_size
    if min(size) == module.window_size and not getattr(module, 'pad_small_map', True):
        shift = 0  # mmpretrain's: one window holds the smaller side
    return [*size, module.window_size, shift]


def _encoded(module: Any, given: Mapping[str, Any]) -> list[int]:
    """Return the size of a map that gets positions: of what a decoder's queries attend to."""
    return [*(given['mask'] if given.get('mask') is not None else given['input']).shape[-2:]]


# (height, width, window, shift), (height, width, ratio of PVT's or MiT's keys), or of windows that are not square
# (height, width, window height, window width, shift)
_GEOMETRY: dict[str, Callable[[Any, Mapping[str, Any]], list[int]]] = {
    **dict.fromkeys(('mmdet.ShiftWindowMSA', 'mmseg.ShiftWindowMSA', 'mmpretrain.ShiftWindowMSA'), _shifted_windows),
    **dict.fromkeys(
        ('mmdet.SpatialReductionAttention', 'mmseg.EfficientMultiheadAttention'),
        lambda module, given: [*given['hw_shape'], module.sr_ratio],
    ),
    'timm.GlobalContextVitBlock': lambda module, given: [*given['x'].shape[1:3], *module.window_size, 0],
    'mmpretrain.TinyViTBlock': lambda module, given: [*module.img_size, module.window_size, 0],
}


def _place(name: str, read: Callable[[Any, Mapping[str, Any]], list[int]]) -> Probe:
    return lambda module, **given: {name: lambda: torch.tensor(read(module, given))}


for _kind, _read in _GEOMETRY.items():
    probes(_kind, reads=('geometry',))(_place('geometry', _read))
probes('mmdet.SinePositionalEncoding', 'mmdet.LearnedPositionalEncoding', reads=('map_size',))(
    _place('map_size', _encoded)
)
