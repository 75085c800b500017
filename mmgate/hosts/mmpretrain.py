"""mmpretrain's attentions as hosts: of plain vision transformers, Swin in both versions, and SAM."""

from __future__ import annotations

import logging
from functools import cache, partial
from typing import Any

from mmengine.logging import print_log
from mmpretrain.models.backbones.vit_sam import Attention
from mmpretrain.models.utils.attention import MultiheadAttention, ShiftWindowMSA, WindowMSA, WindowMSAV2
from torch import nn

from mmgate.hosts.core import gate_alone
from mmgate.hosts.cosine_window import GatedCosineWindowMSA
from mmgate.hosts.relative import adapt_relative
from mmgate.hosts.swin import adapt_swin
from mmgate.hosts.table import adapts
from mmgate.hosts.token_attention import GatedTokenAttention
from mmgate.layers.base.dense import GatedMultiheadAttention
from mmgate.layers.base.map import MapAttention

adapt_swin(WindowMSA, ShiftWindowMSA)
adapt_relative(Attention)


@adapts(GatedMultiheadAttention, WindowMSAV2)
def cosine_windows(gate: type[GatedMultiheadAttention], host: Any, /, **options: Any) -> GatedCosineWindowMSA:
    """Hold the gate's parameters beside the host's own.

    Raises:
        ValueError: A gate that needs other logits than cosines.
    """
    core = gate.core(host.embed_dims, host.num_heads, host.attn_drop.p, batch_first=True, **options)
    if core.two_streams:
        raise ValueError(
            f'{gate.__name__} splits heads into two streams, but a WindowMSAV2 attends by the cosine of whole heads: '
            'halves of unit vectors are none.'
        )
    return GatedCosineWindowMSA(gate_alone(core), host)


@adapts(GatedMultiheadAttention, MultiheadAttention)
def tokens(gate: type[GatedMultiheadAttention], host: Any, /, **options: Any) -> GatedTokenAttention:
    """Take over sizes, dropouts and layer scale.

    Raises:
        ValueError: The host has an extra that the core lacks.
    """
    _refuse_extras(gate, host)
    if isinstance(host.scaled_dot_product_attention, partial):
        _warn_of_scale(gate.__name__)
    core = gate.core(host.embed_dims, host.num_heads, host.attn_drop, batch_first=True, **options)
    if host.qkv.bias is None:  # T2T-ViT has one of the two
        core.register_parameter('in_proj_bias', None)
    if host.proj.bias is None:
        core.out_proj.register_parameter('bias', None)
    return GatedTokenAttention(core, host.proj_drop, host.gamma1, host.out_drop)


@adapts(MapAttention, MultiheadAttention)
def map_of_tokens(gate: type[MapAttention], host: Any, /, **options: Any) -> MapAttention:
    """Take over sizes and dropouts; the rule says ``map_size`` and ``class_token``, which the host does not know.

    Raises:
        ValueError: The host has an extra that the gate lacks.
    """
    layer_scale = not isinstance(host.gamma1, nn.Identity)
    _refuse_extras(gate, host, layer_scale=layer_scale, projection_without_bias=host.proj.bias is None)
    module = gate(
        host.embed_dims,
        host.num_heads,
        qkv_bias=host.qkv.bias is not None,
        attn_drop=host.attn_drop,
        proj_drop=host.proj_drop.p,
        **options,
    )
    module.dropout_layer = host.out_drop
    return module


@cache
def _warn_of_scale(gate: str) -> None:
    print_log(
        f"{gate} scales logits by 1 / sqrt(d), as T2T-ViT's paper. mmpretrain's MultiheadAttention with a qk_scale "
        'divides them by that number, so that without the gate the model computes something else.',
        logger='current',
        level=logging.WARNING,
    )


def _refuse_extras(gate: type[nn.Module], host: Any, **further: bool) -> None:
    extras = dict(v_shortcut=host.v_shortcut, input_dims=host.input_dims != host.embed_dims, **further)
    refused = [name for name, used in extras.items() if used]
    if refused:
        raise ValueError(f'{gate.__name__} does not replace a MultiheadAttention with {", ".join(refused)}.')
