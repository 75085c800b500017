"""mmpretrain's attentions as hosts: of plain vision transformers, Swin in both versions, SAM, TinyViT and XCiT."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from mmpretrain.models.backbones.vit_sam import Attention
from mmpretrain.models.backbones.xcit import XCA
from mmpretrain.models.utils.attention import (
    LeAttention,
    MultiheadAttention,
    ShiftWindowMSA,
    WindowMSA,
    WindowMSAV2,
    scaled_dot_product_attention_pyimpl,
)
from torch import Tensor, nn

from mmgate.hosts.core import attend_in_host, holds_gates
from mmgate.hosts.relative_positions import adapt_relative
from mmgate.hosts.table import adapts
from mmgate.hosts.window import Renamed, adapt_swin
from mmgate.layers.base.dense import DenseAttention, GatedMultiheadAttention
from mmgate.layers.base.map import MapAttention
from mmgate.layers.plug_dense import PLuGAttention
from mmgate.layers.sdpa_gate import SDPAGatedAttention

LARGEST = math.log(100.0)  # of Swin v2's logit_scale

adapt_swin(WindowMSA, ShiftWindowMSA)
adapt_relative(Attention)


@holds_gates(
    WindowMSAV2,
    refuses=lambda host, core: (
        'splits heads into two streams, but a WindowMSAV2 attends by the cosine of whole heads: halves of unit vectors '
        'are none.'
        if core.two_streams
        else None
    ),
)
class GatedWindowMSAV2(WindowMSAV2):
    """Drop-in for ``WindowMSAV2`` (Swin v2) that holds a gate, for logits that are cosines.

    The logits are ``cos(q, k) / tau``: the gate gets unit queries and keys, ``1 / tau`` shared out evenly between
    them. A gate of queries or keys (G3, G4) therefore acts after they are normalised, before which it would be undone.
    The continuous position bias and the mask ``(nW, N, N)`` of shifted windows are added to the logits after the gate.

    Source: Swin Transformer V2 (arXiv 2111.09883), Eq. 2 and section 3.3.
    """

    gate: Any

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend within windows ``(B nW, N, C)``, those of an image next to each other."""
        bias = None if self.q_bias is None else torch.cat((self.q_bias, torch.zeros_like(self.q_bias), self.v_bias))
        projected = F.linear(x, self.qkv.weight, bias).chunk(3, -1)
        query, key, value = (self.gate.split_heads(part) for part in projected)  # (B nW, H, N, d)
        # cos(q, k) / tau = q' k' / sqrt(d)
        factor = (self.logit_scale.clamp(max=LARGEST).exp() * query.shape[-1] ** 0.5).sqrt()  # (H, 1, 1)
        # normalised in the precision of the parameters, which under autocast is not that of the projections
        unit = (F.normalize(part.to(factor.dtype), dim=-1) for part in (query, key))
        query, key = ((part * factor).to(value.dtype) for part in unit)
        bias = self._position_bias()[None]
        if mask is not None:
            bias = (bias + mask[:, None]).repeat(x.shape[0] // mask.shape[0], 1, 1, 1)
        out = attend_in_host(self.gate, (query, key, value), (x, x, x), self.proj, bias.to(query.dtype))
        return self.proj_drop(out)

    def _position_bias(self) -> Tensor:
        table = self.cpb_mlp(self.relative_coords_table).flatten(0, 2)  # (distances, H)
        return 16 * table[self.relative_position_index].permute(2, 0, 1).sigmoid()  # (H, N, N)


class GatedTokenAttention(Renamed):
    """Self-attention over the tokens of a ViT around a gated attention.

    Drop-in for mmpretrain's ``MultiheadAttention``, whose checkpoints it loads: the projections are renamed.
    """

    def __init__(self, attn: DenseAttention, host: Any) -> None:
        super().__init__()
        self.attn, self.proj_drop, self.gamma1, self.out_drop = attn, host.proj_drop, host.gamma1, host.out_drop

    def forward(self, x: Tensor) -> Tensor:
        """Attend over ``(B, N, C)`` tokens."""
        out = self.attn(x, x, x)[0].contiguous()  # as the host's, for what is dropped to be the same
        return self.out_drop(self.gamma1(self.proj_drop(out)))


@adapts(GatedMultiheadAttention, MultiheadAttention)
def tokens(gate: type[GatedMultiheadAttention], host: Any, /, **options: Any) -> GatedTokenAttention:
    """Take over sizes, dropouts, layer scale and the scale of the logits.

    Raises:
        ValueError: The host has an extra that the core lacks, or scales its logits as the gate cannot.
    """
    _refuse_extras(gate, host)
    core = gate.core(host.embed_dims, host.num_heads, host.attn_drop, batch_first=True, **options)
    core.logit_factor = _logit_factor(gate, host)
    added = isinstance(core, SDPAGatedAttention) and (core.position, core.form) == ('G4', 'additive')
    if core.logit_factor != 1 and added:
        raise ValueError(
            f"{gate.__name__} does not replace a MultiheadAttention with a qk_scale by position='G4' and "
            "form='additive': the queries carry the scale, and what is added to them would not."
        )
    if host.qkv.bias is None:  # T2T-ViT has one of the two
        core.register_parameter('in_proj_bias', None)
    if host.proj.bias is None:
        core.out_proj.register_parameter('bias', None)
    return GatedTokenAttention(core, host)


@adapts(MapAttention, MultiheadAttention)
def map_of_tokens(gate: type[MapAttention], host: Any, /, **options: Any) -> MapAttention:
    """Take over sizes and dropouts; ``map_size`` and ``class_token`` come from the rule, or from the whole backbone.

    Raises:
        ValueError: The host has an extra that the gate lacks.
    """
    layer_scale = not isinstance(host.gamma1, nn.Identity)
    _refuse_extras(gate, host, layer_scale=layer_scale, projection_without_bias=host.proj.bias is None)
    taken = dict(attn_drop=host.attn_drop, proj_drop=host.proj_drop.p, qkv_bias=host.qkv.bias is not None)
    scale = _logit_factor(gate, host) * host.head_dims**-0.5
    module = gate(host.embed_dims, host.num_heads, qk_scale=scale, **taken, **options)
    module.dropout_layer = host.out_drop
    return module


def _logit_factor(gate: type[nn.Module], host: Any) -> float:
    """Return by how much the host's logits are larger than those of a scale of ``1 / sqrt(d)``.

    With any qk_scale mmpretrain divides by ``1 / sqrt(d)``, and so do all layers of its T2T-ViT.
    """
    product = host.scaled_dot_product_attention
    if product in (F.scaled_dot_product_attention, scaled_dot_product_attention_pyimpl):
        return 1.0
    divides = isinstance(product, partial) and product.func is scaled_dot_product_attention_pyimpl
    if divides and not product.args and set(product.keywords) == {'scale'}:
        return host.head_dims**0.5 / product.keywords['scale']
    raise ValueError(
        f"{gate.__name__} does not replace a MultiheadAttention whose scaled_dot_product_attention is not mmpretrain's."
    )


def _refuse_extras(gate: type[nn.Module], host: Any, **further: bool) -> None:
    extras = dict(v_shortcut=host.v_shortcut, input_dims=host.input_dims != host.embed_dims, **further)
    refused = [name for name, used in extras.items() if used]
    if refused:
        raise ValueError(f'{gate.__name__} does not replace a MultiheadAttention with {", ".join(refused)}.')


@holds_gates(
    LeAttention,
    sizes=lambda host: (host.num_heads * host.key_dim, host.num_heads, 0.0),
    width=lambda host: host.qkv.in_features,
    refuses=lambda host, core: (
        None
        if host.d == host.key_dim  # not LeViT's
        else f'gates heads of one width, but here are keys of {host.key_dim} and values of {host.d} channels.'
    ),
)
class GatedLeAttention(LeAttention):
    """Drop-in for ``LeAttention`` (TinyViT) that holds a gate; the bias of positions is added after it."""

    gate: Any

    def forward(self, x: Tensor) -> Tensor:
        """Attend over ``(B, N, C)`` tokens."""
        x = self.norm(x)
        joint = self.qkv(x).unflatten(-1, (self.num_heads, 3, self.key_dim))
        query, key, value = joint.permute(3, 0, 2, 1, 4)  # (B, H, N, d)
        # the host keeps the biases in evaluation and drops them for training
        bias = self.ab if hasattr(self, 'ab') else self.attention_biases[:, self.attention_bias_idxs]
        return attend_in_host(self.gate, (query, key, value), (x, x, x), self.proj, bias[None].to(query.dtype))


def _not_of_channels(host: Any, core: Any) -> str | None:
    if not isinstance(core, PLuGAttention):
        return (
            'gates tokens, but in a cross-covariance attention (XCA) the channels attend to each other; '
            'PLuGMultiheadAttention gates their pairs.'
        )
    if core.gate_width != core.head_dim:
        return (
            f'makes a gate of {core.gate_width} x {core.gate_width} pairs of channels, but the heads of this XCA have '
            f'{core.head_dim}; leave ratio at 1.'
        )
    return None


@holds_gates(
    XCA, sizes=lambda host: (host.proj.in_features, host.num_heads, host.attn_drop.p), refuses=_not_of_channels
)
class GatedXCA(XCA):
    """Drop-in for XCiT's cross-covariance attention that holds a PLuG gate.

    There the d channels of a head attend to each other, so that logits and gate are d x d maps. The gate is formed as
    the host forms its logits: from ``Wq x`` and ``Wk x``, d channels each, normalised over the tokens. The paper says
    that PLuG acts within this layer, but not how its products are scaled; normalised, they do not grow with the image.
    """

    gate: PLuGAttention
    over_channels = True  # there is no map of tokens to look at

    def forward(self, x: Tensor) -> Tensor:
        """Attend over the channels of ``(B, N, C)`` tokens."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 4, 1)  # (B, H, d, N)
        tokens = x.shape[1]
        # what attends here divides its products by the square root of their length
        query = F.normalize(query, dim=-1) * (self.temperature * tokens**0.5).to(query.dtype)
        out = self.gate.attend_gated(query, F.normalize(key, dim=-1), value, self._gates(x), None)
        return self.proj_drop(self.proj(out.permute(0, 3, 1, 2).flatten(2)))

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query, key = (F.normalize(gate.transpose(-1, -2), dim=-1) for gate in self.gate.gates((x, x, x)))
        return query * x.shape[1] ** 0.5, key  # (B, H|1, d, N)
