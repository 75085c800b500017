"""A dense gate without projections, held by a copy of a host that computes its own."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, TypeVar

from torch import Tensor, nn

from mmgate.hosts.table import Host, adapts
from mmgate.layers.base.dense import DenseAttention, GatedMultiheadAttention, Inputs
from mmgate.layers.base.map import MapAttention
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


def of_attributes(host: Any) -> tuple[int, int, float]:
    """Return channels, heads and the rate of dropped weights of a host that names them as mm packages do."""
    return host.embed_dims, host.num_heads, host.attn_drop.p


def holds_gates(
    *hosts: Host,
    sizes: Callable[[Any], tuple[int, int, float]] = of_attributes,
    width: Callable[[Any], int] | None = None,
    refuses: Callable[[Any, DenseAttention], str | None] = lambda host, core: None,
) -> Callable[[type[Kind]], type[Kind]]:
    """Let dense gates replace ``hosts`` by copies of the decorated subclass, which finds a gate's core as ``gate``.

    Args:
        *hosts: Host classes; the subclass attends with a gate between their projections.
        sizes: Returns the channels of a host's heads together, their number, and the rate of dropped weights.
        width: Returns the channels of a host's inputs and output, where they are not those of the heads.
        refuses: Returns why a gate's core does not fit a host, or None.
    """

    def register(kind: type[Kind]) -> type[Kind]:
        @adapts(GatedMultiheadAttention, *hosts)
        def adapter(gate: type[GatedMultiheadAttention], host: Any, /, **options: Any) -> Kind:
            channels, heads, dropout = sizes(host)
            wide = channels if width is None else width(host)
            inputs: dict[str, Any] = {} if wide == channels else dict(qdim=wide, kdim=wide, vdim=wide)
            core = gate.core(channels, heads, dropout, batch_first=True, **inputs, **options)
            reason = refuses(host, core)
            if reason:
                raise ValueError(f'{gate.__name__} {reason}')
            refuse_finish(gate, core, wide)
            return copy_as(kind, host, gate=without_projections(core))

        return kind

    return register


def refuse_finish(gate: type[nn.Module], core: DenseAttention, width: int) -> None:
    """Raise ValueError if ``core`` acts on a host's output of another ``width`` than that of the heads together."""
    if core.finishes and width != core.embed_dim:
        raise ValueError(
            f'{gate.__name__} acts behind an output projection as wide as the heads, but this one goes from '
            f'{core.embed_dim} to {width} channels.'
        )


def own_scale(host: Any, core: DenseAttention | None = None) -> str | None:
    """Return that ``host`` scales its logits by another number than ``1 / sqrt(d)``, which a gate would lose."""
    default = (host.embed_dims // host.num_heads) ** -0.5
    return None if host.scale == default else f'does not replace a {type(host).__name__} with a qk_scale of its own.'


def attend_over_map(gate: type[MapAttention], host: Any, /, **options: Any) -> MapAttention:
    """Return a gate with sizes, scale and dropouts of ``host``, which attends within windows or stripes."""
    bias, drop = host.qkv.bias is not None, getattr(host.attn_drop, 'p', host.attn_drop)
    taken = dict(qkv_bias=bias, qk_scale=host.scale, attn_drop=drop, proj_drop=host.proj_drop.p)
    module = gate(host.embed_dims, host.num_heads, **taken, **options)
    module.dropout_layer = getattr(host, 'dropout_layer', module.dropout_layer)
    return module


def attend_in_host(
    gate: DenseAttention,
    projected: tuple[Tensor, Tensor, Tensor],
    inputs: Inputs,
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
