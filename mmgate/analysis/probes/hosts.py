"""Read attention weights of modules other than torch's and mmcv's, such as Swin's, and the layout of their maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mmgate.analysis.probes.attention import Given, Read, arguments_of, reads


def _before_dropout(module: Any, given: Given) -> Tensor:
    """Return the attention weights that a module passes to its ``attn_drop``: ``(B, H, N, M)`` or ``(B nW, H, N, N)``.

    The latter is the shape of attention inside windows.
    """
    return arguments_of(module.attn_drop, 'forward', module, given)[0]


class _Products(TorchFunctionMode):
    """Torch function mode that keeps both factors of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm):
            self.factors.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))


def _times_weights(module: Any, given: Given) -> Tensor:
    """Return the values that a module multiplies by its attention weights, in the layout of that product."""
    with _Products() as products:
        weights = _before_dropout(module, given)
    # Without dropout the weights are the same memory before and after.
    (values,) = (second for first, second in products.factors if first.data_ptr() == weights.data_ptr())
    return values


def _unfused(read: Read) -> Read:
    """Wrap a reading function for timm's modules: it runs without fused attention, which forms no weights."""

    def read_unfused(module: Any, given: Given) -> Tensor:
        fused = module.fused_attn
        module.fused_attn = False
        try:
            return read(module, given)
        finally:
            module.fused_attn = fused

    return read_unfused


def _le_projected(module: Any, given: Given) -> tuple[Tensor, ...]:
    joint = module.qkv(module.norm(given['x'])).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
    return joint.split([module.key_dim, module.key_dim, module.d], -1)


def _le_attention(module: Any, given: Given) -> Tensor:
    query, key, _ = _le_projected(module, given)
    logits = query @ key.transpose(-1, -2) * module.scale
    return (logits + module.attention_biases[:, module.attention_bias_idxs]).softmax(-1)


def _token_projections(module: Any, given: Given) -> Tensor:
    return module.qkv(given['x']).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)


def _tokens(module: Any, given: Given) -> Tensor:
    query, key, _ = _token_projections(module, given)
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
    values=_times_weights,
)
reads(
    *('timm.layers.attention.Attention', 'timm.layers.attention.AttentionRope', 'timm.models.eva.EvaAttention'),
    'timm.models.swin_transformer.WindowAttention',
    attention=_unfused(_before_dropout),
    values=_unfused(_times_weights),
)
reads(  # Conditional DETR's and DAB-DETR's
    'mmdet.ConditionalAttention',
    attention=lambda module, given: _before_dropout(module, given).unflatten(0, (-1, module.num_heads)),
    values=lambda module, given: _times_weights(module, given).unflatten(0, (-1, module.num_heads)),
)
reads(
    'mmpretrain.LeAttention',
    attention=_le_attention,
    values=lambda module, given: _le_projected(module, given)[2],
)
reads(
    'mmpretrain.MultiheadAttention',
    attention=_tokens,
    values=lambda module, given: _token_projections(module, given)[2],
)
# A geometry is (height, width, window, shift), (height, width, window height, window width, shift), or, where PVT and
# MiT reduce the keys, (height, width, ratio).
reads(
    'mmseg.LocallyGroupedSelfAttention',
    attention=lambda module, given: _before_dropout(module, given).flatten(0, 1),
    values=lambda module, given: _times_weights(module, given).flatten(0, 1),
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
