"""Turn attention masks into one bias that is added to the logits, and treat rows whose keys are all masked."""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import broadcasts_to


def merge_masks(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, batch: int, heads: int, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Merge torch's ``attn_mask`` and ``key_padding_mask`` into one bias that is added to the logits.

    A row whose keys are all masked would be NaN after a softmax, and so would its gradients. Its bias is set to 0 here,
    and the caller has to set its output to 0.

    Args:
        attn_mask: Mask ``(N, M)``, ``(B * H, N, M)`` or ``(B, H|1, N, M)``; bool (True masks) or float (is added).
        key_padding_mask: Mask of keys ``(B, M)``; bool or float, too.
        batch: Batch size B.
        heads: Heads H.
        dtype: Dtype of the logits.

    Returns:
        The bias, broadcastable to ``(B, H, N, M)``, and a bool tensor ``(B|1, H|1, N|1, 1)`` that is True for the rows
        whose keys are all masked. Both are None if there is no mask.

    Raises:
        ValueError: A mask has another shape.
    """
    bias: Tensor | None = None
    if attn_mask is not None:
        if attn_mask.dim() == 2:
            attn_mask = attn_mask[None, None]
        elif attn_mask.dim() == 3 and attn_mask.shape[0] == batch * heads:
            attn_mask = attn_mask.unflatten(0, (batch, heads))
        elif attn_mask.dim() != 4 or not broadcasts_to(attn_mask.shape[:2], (batch, heads)):
            shapes = f'(N, M), (B * H, N, M) or (B, H, N, M) with B={batch}, H={heads}'
            raise ValueError(f'attn_mask must be {shapes}, got {tuple(attn_mask.shape)}.')
        bias = _additive(attn_mask, dtype)
    if key_padding_mask is not None:
        if key_padding_mask.dim() != 2 or key_padding_mask.shape[0] != batch:
            raise ValueError(f'key_padding_mask must be (B, M) with B={batch}, got {tuple(key_padding_mask.shape)}.')
        padding = _additive(key_padding_mask[:, None, None], dtype)
        if bias is not None and not broadcasts_to(padding.shape[-1:], bias.shape[-1:]):
            shapes = f'key_padding_mask {tuple(key_padding_mask.shape)} and attn_mask {tuple(bias.shape)}'
            raise ValueError(f'{shapes} differ in keys.')
        bias = padding if bias is None else bias + padding
    if bias is None:
        return None, None
    all_masked = (bias == float('-inf')).all(-1, keepdim=True)
    return bias.masked_fill(all_masked, 0.0), all_masked


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a mask, bool or float, into a tensor that is added to the logits."""
    if mask.is_floating_point():
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask.bool(), float('-inf'))
