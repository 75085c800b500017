"""A dense gate without projections, for hosts that compute their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn

from mmgate.layers.base.dense import DenseAttention
from mmgate.ops.masks import merge_masks

Core = TypeVar('Core', bound=DenseAttention)


def gate_alone(core: Core) -> Core:
    """Take the projections off ``core``; what is left are the gate's parameters, to be held by the host's subclass."""
    for name in ('in_proj_weight', 'in_proj_bias', 'q_proj_weight', 'k_proj_weight', 'v_proj_weight'):
        core.register_parameter(name, None)
    core._modules['out_proj'] = nn.Identity()
    return core


def attend_in_host(
    gate: DenseAttention,
    projected: tuple[Tensor, Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    out_proj: Callable[[Tensor], Tensor],
    bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """Attend with a gate between a host's projections.

    Args:
        gate: What :func:`gate_alone` returned.
        projected: Query, key and value ``(B, H, N|M, d)``; the value may have another width.
        inputs: What the host made them from, ``(B, N|M, C)``, position embedding included: what gates read.
        out_proj: The host's output projection.
        bias: Added to the logits, broadcastable to ``(B, H, N, M)``; no row -inf throughout.
        attn_mask: See :func:`~mmgate.ops.masks.merge_masks`.
        key_padding_mask: ``(B, M)``, likewise.

    Returns:
        ``(B, N, C)``. A row whose keys are all masked gets zeros from the heads.
    """
    query, key, value = projected
    masks, dead = merge_masks(attn_mask, key_padding_mask, query.shape[0], query.shape[1], query.dtype)
    if masks is not None:
        bias = masks if bias is None else bias + masks
    heads = gate.attend(query, key, value, inputs, bias)
    if dead is not None:
        heads = heads.masked_fill(dead, 0.0)
    return gate.finish(out_proj(heads.transpose(1, 2).flatten(2)), query, inputs)
