"""Adapters that let gates into mmpretrain's attention: of ViT, Swin, Swin v2, SAM, TinyViT and XCiT."""

from __future__ import annotations

import math
from dataclasses import replace
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

from mmgate.errors import ConfigError
from mmgate.gate import Sizes
from mmgate.gates.base.dense import DenseAdapter, DenseGate
from mmgate.gates.base.map import MapAdapter, MapGate
from mmgate.gates.plug import PLuGGate
from mmgate.hosts.from_model import nearest_with, stride_of
from mmgate.hosts.relative_positions import RelativeAttentionAdapter
from mmgate.hosts.table import adapts
from mmgate.hosts.window import adapt_swin

LARGEST = math.log(100.0)  # of Swin v2's logit_scale

adapt_swin(WindowMSA, ShiftWindowMSA)
adapts(DenseGate, Attention)(RelativeAttentionAdapter)


@adapts(DenseGate, WindowMSAV2)
class WindowMSAV2Adapter(DenseAdapter):
    """Adapter that lets dense gates into mmpretrain's ``WindowMSAV2`` (Swin v2), whose logits are cosines.

    The logits are ``cos(q, k) / tau``: the gate gets unit queries and keys, ``1 / tau`` shared out evenly between
    them. A gate of queries or keys (G3, G4) therefore acts after they are normalised, before which it would be undone.
    The continuous position bias and the mask ``(nW, N, N)`` of shifted windows are added to the logits after the gate.

    Source: Swin Transformer V2 (arXiv 2111.09883), Eq. 2 and section 3.3.
    """

    qkv: nn.Linear
    q_bias: Tensor | None
    v_bias: Tensor
    logit_scale: Tensor
    cpb_mlp: nn.Module
    relative_coords_table: Tensor
    relative_position_index: Tensor
    proj: nn.Module
    proj_drop: nn.Module

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Read channels, heads and dropout off an attention module (the host), for its gate.

        Neither halves of unit vectors nor queries that a gate projects are unit vectors.
        """
        reason = f'a {type(host).__name__} attends by the cosine of whole heads'
        return replace(super().sizes(host), why_whole_heads=reason)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend inside each of nW windows of an image, with the gate; ``x`` is ``(B nW, N, C)``, image by image."""
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
        out = self.attend_gated((query, key, value), (x, x, x), self.proj, bias.to(query.dtype))
        return self.proj_drop(out)

    def _position_bias(self) -> Tensor:
        table = self.cpb_mlp(self.relative_coords_table).flatten(0, 2)  # (distances, H)
        return 16 * table[self.relative_position_index].permute(2, 0, 1).sigmoid()  # (H, N, N)


def logit_factor(host: Any) -> float:
    """Return the factor by which an attention's logits exceed those with the usual scale ``1 / sqrt(d)``.

    With any qk_scale mmpretrain divides by ``1 / sqrt(d)``, and so do all layers of its T2T-ViT.

    Raises:
        ConfigError: The host's product is not mmpretrain's.
    """
    product = host.scaled_dot_product_attention
    if product in (F.scaled_dot_product_attention, scaled_dot_product_attention_pyimpl):
        return 1.0
    scaled = isinstance(product, partial) and product.func is scaled_dot_product_attention_pyimpl
    if scaled and not product.args and set(product.keywords) == {'scale'}:
        return host.head_dims**0.5 / product.keywords['scale']
    raise ConfigError("its scaled_dot_product_attention is not mmpretrain's.")


def extras(host: Any) -> str:
    """Return the extras of an attention that its gated forward lacks, such as ``v_shortcut``, in words for an error."""
    found = dict(v_shortcut=host.v_shortcut, input_dims=host.input_dims != host.embed_dims)
    names = [name for name, used in found.items() if used]
    return f'this MultiheadAttention has {", ".join(names)}.' if names else ''


def sizes_of_tokens(host: Any) -> Sizes:
    """Read channels, heads, dropout and the scale of the logits off mmpretrain's ``MultiheadAttention``."""
    return Sizes(
        host.embed_dims,
        host.num_heads,
        dropout=host.attn_drop,
        scale=logit_factor(host) * host.head_dims**-0.5,
        bias=host.qkv.bias is not None,
    )


@adapts(DenseGate, MultiheadAttention)
class TokenAttentionAdapter(DenseAdapter):
    """Adapter that lets dense gates into mmpretrain's ``MultiheadAttention``, as in its ViTs."""

    num_heads: int
    v_shortcut: bool
    qkv: nn.Module
    proj: nn.Module
    proj_drop: nn.Module
    gamma1: nn.Module
    out_drop: nn.Module

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Read the sizes off an attention module (the host), for its gate."""
        return replace(sizes_of_tokens(host), why_no_gate=extras(host))

    def forward(self, x: Tensor) -> Tensor:
        """Attend over the tokens ``(B, N, C)``, with the gate."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, N, d)
        out = self.attend_gated((query, key, value), (x, x, x), self.proj)
        out = out.contiguous()  # as the host's, for what is dropped to be the same
        out = self.out_drop(self.gamma1(self.proj_drop(out)))
        return value.squeeze(1) + out if self.v_shortcut else out


@adapts(MapGate, MultiheadAttention)
class MixedTokenAttention(MapAdapter):
    """Adapter that lets attention over a map (Agent, SAGA, linear) replace mmpretrain's ``MultiheadAttention``.

    A call of it does not name the map. It is the one that the ViT was built for, and images of another shape with as
    many patches cannot be told from it.
    """

    proj: nn.Module
    proj_drop: nn.Module
    gamma1: nn.Module
    out_drop: nn.Module

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Read the sizes off an attention module (the host), for its gate."""
        return sizes_of_tokens(host)

    @classmethod
    def check(cls, host: Any) -> None:
        """Raise ConfigError if the host has an extra that a gated forward lacks."""
        reason = extras(host)
        if reason:
            raise ConfigError(reason)

    @classmethod
    def sizes_from_model(cls, model: nn.Module, path: str) -> dict[str, Any]:
        """Return the map of the ViT around, the number of tokens before it, and the stride.

        Raises:
            ConfigError: The model around keeps no map.
        """
        vit = nearest_with(model, path, 'patch_resolution')
        if vit is None:
            raise ConfigError(
                'a call of a MultiheadAttention does not name the map, and no ViT around it keeps one '
                '(patch_resolution). Gate the whole ViT.'
            )
        height, width = vit.patch_resolution
        told = stride_of(getattr(vit, 'img_size', None), (height, width))
        return dict(host_map=(height, width), class_tokens=vit.num_extra_tokens, **told)

    def finish(self, x: Tensor) -> Tensor:
        """Project the mixed tokens, scale them by LayerScale, and apply the host's dropouts."""
        return self.out_drop(self.gamma1(self.proj_drop(self.proj(x))))

    def forward(self, x: Tensor) -> Tensor:
        """Attend over the tokens ``(B, N, C)`` of a map, with the gate."""
        return self.attend_gated(x)


@adapts(DenseGate, LeAttention)
class LeAttentionAdapter(DenseAdapter):
    """Adapter that lets dense gates into mmpretrain's ``LeAttention`` (TinyViT).

    The position bias is added after the gate.
    """

    num_heads: int
    key_dim: int
    d: int
    norm: nn.Module
    qkv: nn.Module
    proj: nn.Module
    attention_biases: Tensor
    attention_bias_idxs: Tensor
    ab: Tensor

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Read the sizes off an attention module (the host), whose heads and tokens may differ in width."""
        width = host.qkv.in_features
        reason = ''
        if host.d != host.key_dim:  # as in LeViT
            reason = f'heads need one width, but here are keys of {host.key_dim} and values of {host.d} channels.'
        return Sizes(
            host.num_heads * host.key_dim,
            host.num_heads,
            inputs=(width, width, width),
            output=width,
            why_no_gate=reason,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Attend over the tokens ``(B, N, C)``, with the gate."""
        x = self.norm(x)
        joint = self.qkv(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        query, key, value = joint.split([self.key_dim, self.key_dim, self.d], -1)  # (B, H, N, d)
        # The host keeps a copy for evaluation, and in its first train() makes one that it does not use.
        bias = self.attention_biases[:, self.attention_bias_idxs] if self.training else self.ab
        return self.attend_gated((query, key, value), (x, x, x), self.proj, bias[None].to(query.dtype))


@adapts(PLuGGate, XCA)
class XCAAdapter(DenseAdapter):
    """Adapter that lets PLuG's gates into XCiT's cross-covariance attention.

    There the d channels of a head attend to each other, so that logits and gate are d x d maps. The gate is formed as
    the host forms its logits: from ``Wq x`` and ``Wk x``, d channels each, normalised over the tokens. The paper says
    that PLuG acts within this layer, but not how its products are scaled; normalised, they do not grow with the number
    of tokens.
    """

    num_heads: int
    qkv: nn.Module
    temperature: Tensor
    proj: nn.Module
    proj_drop: nn.Module

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Read channels, heads and dropout off an attention module (the host), for its gate."""
        return Sizes(host.proj.in_features, host.num_heads, dropout=host.attn_drop.p, over_channels=True)

    def forward(self, x: Tensor) -> Tensor:
        """Attend between the channels of the tokens ``(B, N, C)``, with the gate."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 4, 1)  # (B, H, d, N)
        tokens = x.shape[1]
        # what attends here divides its products by the square root of their length
        query = F.normalize(query, dim=-1) * (self.temperature * tokens**0.5).to(query.dtype)
        out = self.gate.attend_by_vectors(query, F.normalize(key, dim=-1), value, self._pairs(x), None)
        return self.proj_drop(self.proj(out.permute(0, 3, 1, 2).flatten(2)))

    def _pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query, key = (F.normalize(gate.transpose(-1, -2), dim=-1) for gate in self.gate.gate_vectors((x, x, x)))
        return query * x.shape[1] ** 0.5, key  # (B, H|1, d, N)
