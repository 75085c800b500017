"""A dense gate without projections, held by a copy of a host that computes its own."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, TypeVar

from torch import Tensor, nn

from mmgate.layers.base.dense import DenseAttention, GatedMultiheadAttention
from mmgate.ops.masks import merge_masks

Core = TypeVar('Core', bound=DenseAttention)
Kind = TypeVar('Kind', bound=nn.Module)


def without_projections(core: Core) -> Core:
    """Take the projections off ``core``: what is left are the gate's parameters, for a module that holds a host's."""
    for name in ('in_proj_weight', 'in_proj_bias', 'q_proj_weight', 'k_proj_weight', 'v_proj_weight'):
        core.register_parameter(name, None)
    core._modules['out_proj'] = nn.Identity()
    core.has_projections = False
    return core


def copy_as(kind: type[Kind], host: nn.Module, **gates: nn.Module) -> Kind:
    """Return a copy of ``host`` as its subclass ``kind``, with ``gates`` as children.

    Hosts' constructors keep too little of what they were given to be called once more.
    """
    gated: Any = deepcopy(host)
    gated.__class__ = kind
    for name, gate in gates.items():
        gated.add_module(name, gate)
    return gated


def gated_copy(
    kind: type[Kind],
    host: nn.Module,
    gate: type[GatedMultiheadAttention],
    channels: int,
    heads: int,
    dropout: float,
    /,
    *,
    width: int | None = None,
    **options: Any,
) -> Kind:
    """Return a copy of ``host`` as its subclass ``kind``, with the gate's core without projections as ``gate``.

    Args:
        kind: Subclass of the host's class that attends with a gate between the host's projections.
        host: The module to be replaced.
        gate: The gate.
        channels: Of the heads together.
        heads: Of the attention.
        dropout: Probability of dropping an attention weight.
        width: Channels of the inputs and the output, where they are not those of the heads.
        **options: Of the gate.

    Raises:
        ValueError: The gate acts behind the output projection, which is not as wide as the heads.
    """
    inputs: dict[str, Any] = {} if width in (None, channels) else dict(qdim=width, kdim=width, vdim=width)
    core = gate.core(channels, heads, dropout, batch_first=True, **inputs, **options)
    if inputs and core.finishes:
        raise ValueError(
            f'{gate.__name__} acts behind an output projection as wide as the heads, but that of this '
            f'{type(host).__name__} goes from {channels} to {width} channels.'
        )
    return copy_as(kind, host, gate=without_projections(core))


def check_scale(gate: type, host: Any) -> None:
    """Raise ValueError if ``host`` scales logits by another number than ``1 / sqrt(d)``, which a gate would lose."""
    if host.scale != (host.embed_dims // host.num_heads) ** -0.5:
        raise ValueError(f'{gate.__name__} does not replace a {type(host).__name__} with a qk_scale of its own.')


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
        gate: What :func:`without_projections` returned.
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
