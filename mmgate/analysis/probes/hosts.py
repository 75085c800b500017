"""Probes of hosts that compute their attention themselves, with a gate in it or without."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmgate.analysis.probes.attention import Readings, probes, without_dropout


def gate_in_host(name: str, host: Any, **given: Any) -> Readings:
    """Read weights ``(B, H, N, M)`` and gate of a gate without projections, which ``host`` holds as ``name``.

    The host runs once more, and what it hands to the gate is noted on the way: so a host that projects, masks and cuts
    windows in its own manner needs no probe of its own. A row whose keys are all masked reads as uniform.
    """
    gate = getattr(host, name)
    handed: dict[str, Any] = {}

    def attend(query: Tensor, key: Tensor, value: Tensor, inputs: tuple[Tensor, ...], bias: Tensor | None) -> Tensor:
        handed.update(query=query, key=key, inputs=inputs, bias=bias)
        return type(gate).attend(gate, query, key, value, inputs, bias)

    gate.attend = attend
    try:
        with without_dropout(host):
            host.forward(**given)
    finally:
        del gate.attend
    return dict(attention=lambda: gate.attention_map(**handed), gate=lambda: gate.read_gate('gate', *handed['inputs']))


def _before_dropout(module: Any, given: dict[str, Any]) -> Tensor:
    """Return the attention weights that a host hands to its ``attn_drop``, ``(B, H, N, M)``."""
    handed: list[Tensor] = []
    handle = module.attn_drop.register_forward_pre_hook(lambda _, args: handed.append(args[0]))
    try:
        with without_dropout(module):
            module.forward(**given)
    finally:
        handle.remove()
    return handed[-1]


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


@probes('timm.GlobalContextVitBlock', reads=('geometry',))
def global_window_geometry(module: Any, x: Tensor, **_: Any) -> Readings:
    """Read ``(height, width, window height, window width, 0)``: where the windows of the attention inside lie."""
    return dict(geometry=lambda: torch.tensor([*x.shape[1:3], *module.window_size, 0]))


@probes('mmpretrain.LeAttention', reads=('attention',))
def le_attention(module: Any, x: Tensor) -> Readings:
    """Read the weights ``(B nW, H, N, N)`` in TinyViT's windows."""

    def attention() -> Tensor:
        joint = module.qkv(module.norm(x)).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
        query, key, _ = joint.split([module.key_dim, module.key_dim, module.d], -1)
        logits = query @ key.transpose(-1, -2) * module.scale
        return (logits + module.attention_biases[:, module.attention_bias_idxs]).softmax(-1)

    return dict(attention=attention)


@probes('mmpretrain.TinyViTBlock', reads=('geometry',))
def tiny_window_geometry(module: Any, **_: Any) -> Readings:
    """Read ``(height, width, window, 0)``, likewise."""
    return dict(geometry=lambda: torch.tensor([*module.img_size, module.window_size, 0]))


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


@probes('mmpretrain.MultiheadAttention', reads=('attention',))
def tokens(module: Any, x: Tensor) -> Readings:
    """Read the weights ``(B, H, N, N)`` of mmpretrain's vision transformers."""

    def attention() -> Tensor:
        query, key, _ = module.qkv(x).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
        # a qk_scale is handed on as what the host's product divides by
        given = getattr(module.scaled_dot_product_attention, 'keywords', {}).get('scale')
        return (query / (query.shape[-1] ** 0.5 if given is None else given) @ key.transpose(-1, -2)).softmax(-1)

    return dict(attention=attention)


@probes('mmdet.SinePositionalEncoding', 'mmdet.LearnedPositionalEncoding', reads=('map_size',))
def encoded_map(module: nn.Module, **given: Any) -> Readings:
    """Read ``(height, width)`` of a map that gets positions: of what a decoder's queries attend to."""
    map_ = given['mask'] if given.get('mask') is not None else given['input']
    return dict(map_size=lambda: torch.tensor(map_.shape[-2:]))
