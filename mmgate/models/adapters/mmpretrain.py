"""mmpretrain's attention of plain vision transformers as a host."""

from __future__ import annotations

from typing import Any

from mmpretrain.models.utils.attention import MultiheadAttention
from torch import nn

from mmgate.layers.dense import GatedMultiheadAttention
from mmgate.layers.map_attention import MapAttention
from mmgate.layers.token_attention import GatedTokenAttention

from .pairs import adapts


@adapts(GatedMultiheadAttention, MultiheadAttention)
def tokens(gate: type[GatedMultiheadAttention], host: Any, /, **options: Any) -> GatedTokenAttention:
    """Take over sizes, dropouts and layer scale.

    Raises:
        ValueError: The host has an extra that the core lacks.
    """
    _refuse_extras(gate, host, one_bias=(host.qkv.bias is None) != (host.proj.bias is None))
    sizes = (host.embed_dims, host.num_heads, host.attn_drop)
    core = gate.core(*sizes, bias=host.qkv.bias is not None, batch_first=True, **options)
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


def _refuse_extras(gate: type[nn.Module], host: Any, **further: bool) -> None:
    extras = dict(v_shortcut=host.v_shortcut, input_dims=host.input_dims != host.embed_dims, **further)
    refused = [name for name, used in extras.items() if used]
    if refused:
        raise ValueError(f'{gate.__name__} does not replace a MultiheadAttention with {", ".join(refused)}.')
