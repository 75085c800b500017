"""Read attention weights of modules other than torch's and mmcv's, such as Swin's, and the layout of their maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmgate.analysis.probes.attention import Given, Read, arguments_of, reads


def _before_dropout(module: Any, given: Given) -> Tensor:
    """Return the attention weights that a module passes to its ``attn_drop``: ``(B, H, N, M)`` or ``(B nW, H, N, N)``.

    The latter is the shape of attention inside windows.
    """
    return arguments_of(module.attn_drop, 'forward', module, given)[0]


def _unfused(module: Any, given: Given) -> Tensor:
    """Return the attention weights of a timm module, computed without its fused attention, which returns none."""
    fused = module.fused_attn
    module.fused_attn = False
    try:
        return _before_dropout(module, given)
    finally:
        module.fused_attn = fused


def _le_attention(module: Any, given: Given) -> Tensor:
    joint = module.qkv(module.norm(given['x'])).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
    query, key, _ = joint.split([module.key_dim, module.key_dim, module.d], -1)
    logits = query @ key.transpose(-1, -2) * module.scale
    return (logits + module.attention_biases[:, module.attention_bias_idxs]).softmax(-1)


def _tokens(module: Any, given: Given) -> Tensor:
    query, key, _ = module.qkv(given['x']).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
    # The host passes a qk_scale on as the divisor of its product.
    divisor = getattr(module.scaled_dot_product_attention, 'keywords', {}).get('scale')
    return (query / (query.shape[-1] ** 0.5 if divisor is None else divisor) @ key.transpose(-1, -2)).softmax(-1)


def _shifted_windows(module: Any, given: Given) -> list[int]:
    size = given['hw_shape']
    shift = module.shift_at(size) if hasattr(module, 'shift_at') else module.shift_size
    if min(size) == module.window_size and not getattr(module, 'pad_small_map', True):
        shift = 0  # in mmpretrain one window then holds the smaller side
    return [*size, module.window_size, shift]


def _encoded(module: Any, given: Given) -> list[int]:
    return [*(given['mask'] if given.get('mask') is not None else given['input']).shape[-2:]]


def _numbers(read: Callable[[Any, Given], list[int]]) -> Read:
    return lambda module, given: torch.tensor(read(module, given))


reads(
    *('mmdet.WindowMSA', 'mmseg.WindowMSA', 'mmpretrain.WindowMSA', 'mmpretrain.WindowMSAV2'),
    *('mmseg.BEiTAttention', 'timm.WindowAttentionGlobal'),
    attention=_before_dropout,
)
reads(
    *('timm.layers.attention.Attention', 'timm.layers.attention.AttentionRope', 'timm.models.eva.EvaAttention'),
    'timm.models.swin_transformer.WindowAttention',
    attention=_unfused,
)
reads(  # Conditional DETR's and DAB-DETR's
    'mmdet.ConditionalAttention',
    attention=lambda module, given: _before_dropout(module, given).unflatten(0, (-1, module.num_heads)),
)
reads('mmpretrain.LeAttention', attention=_le_attention)
reads('mmpretrain.MultiheadAttention', attention=_tokens)
# A geometry is (height, width, window, shift), (height, width, window height, window width, shift), or, where PVT and
# MiT reduce the keys, (height, width, ratio).
reads(
    'mmseg.LocallyGroupedSelfAttention',
    attention=lambda module, given: _before_dropout(module, given).flatten(0, 1),
    geometry=_numbers(lambda module, given: [*given['hw_shape'], module.window_size, 0]),
)
reads(
    *('mmdet.ShiftWindowMSA', 'mmseg.ShiftWindowMSA', 'mmpretrain.ShiftWindowMSA'),
    geometry=_numbers(_shifted_windows),
)
reads(
    *('mmdet.SpatialReductionAttention', 'mmseg.EfficientMultiheadAttention'),
    geometry=_numbers(lambda module, given: [*given['hw_shape'], module.sr_ratio]),
)
reads(
    'timm.GlobalContextVitBlock',
    geometry=_numbers(lambda module, given: [*given['x'].shape[1:3], *module.window_size, 0]),
)
reads(
    'mmpretrain.TinyViTBlock',
    geometry=_numbers(lambda module, given: [*module.img_size, module.window_size, 0]),
)
# The map size is (height, width) of the map that gets positions and to which a decoder's queries attend.
reads('mmdet.SinePositionalEncoding', 'mmdet.LearnedPositionalEncoding', map_size=_numbers(_encoded))
