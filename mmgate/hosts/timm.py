"""Adapters of timm's attentions: of ViT, DINOv2, DINOv3, EVA, Swin, Visformer, GCViT and PVTv2.

mmpretrain, mmdet and mmseg have them through their ``TIMMBackbone``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.layers import apply_rot_embed_cat
from timm.models.gcvit import WindowAttentionGlobal
from timm.models.pvt_v2 import Attention as PVTAttention
from timm.models.visformer import Attention as VisformerAttention
from torch import Tensor, nn

from mmgate.hosts.table import adapts
from mmgate.hosts.window import GatedWindowMSA
from mmgate.layers.base.dense import DenseGate, DenseHost
from mmgate.layers.base.gate import Gate, Sizes
from mmgate.layers.base.map import MapGate, MapHost, Size

# By name, as timm has moved its classes between files.
TOKENS = 'timm.layers.attention.Attention'
ROTARY = ('timm.layers.attention.AttentionRope', 'timm.models.eva.EvaAttention')
WINDOWS = 'timm.models.swin_transformer.WindowAttention'
SWIN_BLOCK = 'timm.models.swin_transformer.SwinTransformerBlock'
OWN_GATES = " It is one of timm's; mmgate.timm.gates_from_timm(model) makes it one of ours."
# timm's own gate has the weight of an SDPA gate at G1 in this place, so that its checkpoints load.
OF_TIMM_GATES = {'gate.weight': 'gate.gate_weight', 'gate.bias': 'gate.gate_bias'}


class TimmHost(DenseHost):
    """Base of the adapters of timm's attentions."""

    num_heads: int
    qkv: nn.Module
    proj: nn.Module
    proj_drop: nn.Module

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Return the sizes of a host, by the names that timm gives them."""
        channels = host.head_dim * host.num_heads
        width = getattr(host, 'dim', channels)
        inputs = (width, width, width)
        return Sizes(channels, host.num_heads, inputs=inputs, output=width, dropout=host.attn_drop.p)


@adapts(DenseGate, VisformerAttention)
class GatedVisformerAttention(TimmHost):
    """Adapter of Visformer's attention, whose projections are convolutions."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend over a map ``(B, C, h, w)``."""
        size = x.shape[2:]
        query, key, value = self.qkv(x).flatten(2).unflatten(1, (3, self.num_heads, -1)).permute(1, 0, 2, 4, 3)
        tokens = x.flatten(2).transpose(1, 2)  # (B, N, C)

        def project(heads: Tensor) -> Tensor:
            return self.proj(heads.transpose(1, 2).unflatten(-1, size)).flatten(2).transpose(1, 2)

        out = self.attend_gated((query, key, value), (tokens, tokens, tokens), project)
        return self.proj_drop(out.transpose(1, 2).unflatten(-1, size))


def shares_by_image(forward: Callable[..., Any]) -> bool:
    """Return True if a host gives an image's global queries to the windows of that image.

    timm up to 1.0.29 repeats the batch instead, which mixes images where there are several.
    """
    return 'repeat_interleave' in forward.__code__.co_names


BY_IMAGE = shares_by_image(WindowAttentionGlobal.forward)


@adapts(DenseGate, WindowAttentionGlobal)
class GatedWindowAttentionGlobal(TimmHost):
    """Adapter of GCViT's attention in windows; the bias of positions is added after the gate.

    Global queries are the image's, shared by its windows and not projected. They are then the gate's query input, too.
    """

    def forward(self, x: Tensor, q_global: Tensor | None = None) -> Tensor:
        """Attend within windows ``(B nW, N, C)``, by the queries of ``q_global`` ``(B, ..., C)`` if they are given."""
        if self.use_global and q_global is not None:
            windows = len(x) // len(q_global)
            asked = q_global.repeat_interleave(windows, 0) if BY_IMAGE else q_global.repeat(windows, 1, 1, 1)
            asked = asked.reshape(x.shape)
            key, value = self.qkv(x).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
            # The queries are not projected, which under autocast would have cast them.
            query = self.gate.split_heads(asked).to(key.dtype)
        else:
            asked = x
            query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        bias = self.rel_pos.get_bias().to(query.dtype)
        return self.proj_drop(self.attend_gated((query, key, value), (asked, x, x), self.proj, bias))


@adapts(DenseGate, PVTAttention)
class GatedPVTAttention(TimmHost):
    """Adapter of PVTv2's attention; keys and values stay those of the reduced map."""

    def forward(self, x: Tensor, feat_size: list[int]) -> Tensor:
        """Attend from ``(B, N, C)`` tokens of a map of ``feat_size`` to those of the reduced one."""
        reduced = x
        if self.sr is not None:
            grid = x.transpose(1, 2).unflatten(-1, tuple(feat_size))
            grid = self.sr(grid if self.pool is None else self.pool(grid))
            reduced = self.norm(grid.flatten(2).transpose(1, 2))
            reduced = reduced if self.act is None else self.act(reduced)
        query = self.gate.split_heads(self.q(x))
        key, value = self.kv(reduced).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj_drop(self.attend_gated((query, key, value), (x, reduced, reduced), self.proj))


def sizes_of(host: Any) -> Sizes:
    """Return the sizes of a host by its projections, whose heads together may have another width than its tokens."""
    joint = getattr(host, 'qkv', None)
    width = (host.q_proj if joint is None else joint).in_features
    return Sizes(
        host.proj.in_features,
        host.num_heads,
        inputs=(width, width, width),
        output=host.proj.out_features,
        dropout=host.attn_drop.p,
        scale=host.scale,
        bias=joint is None or joint.bias is not None,
    )


class TokenProjections(DenseHost):
    """Base of the adapters of attention over a ViT's tokens: the projections, norms and masks of timm.

    A gate at G1 acts before the norm of the heads (``scale_norm``), where there is one; timm's own acts after it.
    """

    host_signature = True
    own_gates = OWN_GATES
    old_names = OF_TIMM_GATES

    num_heads: int
    qkv: nn.Linear | None
    q_norm: nn.Module
    k_norm: nn.Module
    proj: nn.Linear
    proj_drop: nn.Module

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Return the sizes of a host."""
        return sizes_of(host)

    @classmethod
    def refuses(cls, host: Any, gate: Any) -> str | None:
        """Refuse a second set of queries where the host normalises its queries."""
        if gate.adds_queries and not isinstance(host.q_norm, nn.Identity):
            return f'the gate {gate.attends_twice}, but this {type(host).__name__} normalises its queries (qk_norm)'
        return None

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return normalised queries and keys, and values, ``(B, H|h, N, d)``; ``h`` heads where several share one."""
        if self.qkv is None:
            projected = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        elif getattr(self, 'q_bias', None) is not None:  # EVA's, whose keys have no bias
            bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
            projected = [*F.linear(x, self.qkv.weight, bias).chunk(3, -1)]
        else:
            projected = [*self.qkv(x).chunk(3, -1)]
        width = self.proj.in_features // self.num_heads
        query, key, value = (part.unflatten(-1, (-1, width)).transpose(1, 2) for part in projected)
        return self.q_norm(query), self.k_norm(key), value

    def attended(
        self,
        x: Tensor,
        heads: tuple[Tensor, Tensor, Tensor],
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        """Attend between ``heads`` of ``(B, N, C)`` tokens; a mask is timm's, True where a query may attend."""
        query, key, value = heads
        if is_causal:
            tokens = x.shape[1]
            attn_mask = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = ~attn_mask

        def project(merged: Tensor) -> Tensor:
            return self.proj(self.norm(merged) if hasattr(self, 'norm') else merged)

        out = self.attend_gated((query, key, value), (x, x, x), project, attn_mask=attn_mask)
        return self.proj_drop(out)


@adapts(DenseGate, TOKENS)
class GatedAttention(TokenProjections):
    """Adapter of the attention of timm's ViT and of those like it: DeiT, DINOv2, SigLIP, CLIP and more."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attend over ``(B, N, C)`` tokens; a mask broadcasts to ``(B, H, N, N)``, bool (True attends) or added."""
        return self.attended(x, self.heads(x), attn_mask, is_causal)


@adapts(DenseGate, *ROTARY)
class GatedRotaryAttention(TokenProjections):
    """Adapter of the attentions of timm's EVA, DINOv3 and Perception Encoder, which may rotate queries and keys."""

    num_prefix_tokens: int

    @classmethod
    def refuses(cls, host: Any, gate: Any) -> str | None:
        """Refuse two attentions of heads whose channels are rotated in pairs."""
        if gate.attends_twice:
            return f'the gate {gate.attends_twice}, but {type(host).__name__} rotates channels of both together'
        return super().refuses(host, gate)

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Attend over ``(B, N, C)`` tokens, those of the map rotated by ``rope``; masks are as in the ViT's."""
        query, key, value = self.heads(x)
        if rope is not None:
            query = self.rotated(query, rope).type_as(value)
            key = self.rotated(key, rope).type_as(value)
        shared = getattr(self, 'num_kv_groups', 1)
        if shared > 1:
            key = key.repeat_interleave(shared, 1)
            value = value.repeat_interleave(shared, 1)
        return self.attended(x, (query, key, value), attn_mask, is_causal)

    def rotated(self, heads: Tensor, rope: Tensor) -> Tensor:
        """Rotate ``(B, H, N, d)`` by ``rope``, the class and register tokens excepted."""
        before, of_map = heads[:, :, : self.num_prefix_tokens], heads[:, :, self.num_prefix_tokens :]
        halves = dict(half=True) if getattr(self, 'rotate_half', False) else {}
        return torch.cat((before, apply_rot_embed_cat(of_map, rope, **halves)), 2)


@adapts(DenseGate, WINDOWS)
class GatedWindowAttention(GatedWindowMSA):
    """Adapter of the attention within the windows of timm's Swin."""

    old_names: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Return the sizes of a host."""
        return sizes_of(host)

    @classmethod
    def refuses(cls, host: Any, gate: Any) -> str | None:
        """Refuse nothing: timm's windows have no other scale of the logits."""
        return None


def refuse_other_width(host: Any) -> None:
    """Raise ValueError for an attention whose heads together have another width than its input."""
    widths = (host.qkv.in_features, host.proj.in_features, host.proj.out_features)
    if len(set(widths)) > 1:
        raise ValueError(
            f'an attention over a map needs one width, but {type(host).__name__} has {widths[0]} channels, its heads '
            f'{widths[1]} and its output {widths[2]}.'
        )


def note_map(gated: Any, embedding: Any, args: Any, output: Any) -> None:
    """Note the map that a timm model cuts an image into at a gated attention."""
    gated.noted_map = tuple(int(side) for side in embedding.dynamic_feat_size(args[0].shape[-2:]))


@adapts(MapGate, TOKENS)
class MixedAttention(MapHost):
    """Adapter of the attention of timm's ViT for gates over a map; class and register tokens come before it.

    The host is not told the map. That of each image is noted where the model embeds it.

    Attributes:
        noted_map: Height and width of the map that the model has embedded last.
    """

    host_signature = True
    own_gates = OWN_GATES
    noted_map: Size | None = None

    num_heads: int
    q_norm: nn.Module
    k_norm: nn.Module
    proj: nn.Module
    proj_drop: nn.Module

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Return the sizes of a host."""
        return sizes_of(host)

    @classmethod
    def make_gate(cls, host: Any, gate_type: type[Gate], **options: Any) -> nn.Module:
        """Return the gate for a host.

        Raises:
            ValueError: Heads of another width than the tokens, or the gate does not fit.
        """
        refuse_other_width(host)
        return super().make_gate(host, gate_type, **options)

    def after_gating(self, model: nn.Module) -> None:
        """Let the embedding of the nearest model around the host note its map."""
        names = self.gating.name.split('.')
        around = [model.get_submodule('.'.join(names[:count])) for count in range(len(names))]
        embedding: Any = next((part.patch_embed for part in reversed(around) if hasattr(part, 'patch_embed')), None)
        if hasattr(embedding, 'dynamic_feat_size'):
            self.gating.handles.append(embedding.register_forward_hook(partial(note_map, self)))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys, normalised in each head where the host does so, and values ``(B, N, C)``."""
        query, key, value = self.qkv(x).chunk(3, -1)
        shape = (self.num_heads, -1)
        query = self.q_norm(query.unflatten(-1, shape)).flatten(-2)
        key = self.k_norm(key.unflatten(-1, shape)).flatten(-2)
        return query, key, value

    def finish(self, x: Tensor) -> Tensor:
        """Project the output, and drop what the host drops."""
        return self.proj_drop(self.proj(self.norm(x) if hasattr(self, 'norm') else x))

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attend over ``(B, N, C)`` tokens of the noted map, of that of pre-training, or else of a square.

        Raises:
            ValueError: A mask: there are no pairs of tokens to mask.
        """
        if attn_mask is not None or is_causal:
            raise ValueError(
                f'{type(self.gate).__name__} forms no pairs of tokens, so that a mask has nothing to mask.'
            )
        tokens = x.shape[1] - self.gate.class_tokens
        noted = self.noted_map
        fits = noted is not None and noted[0] * noted[1] == tokens
        return self.attend(x, noted if fits else None)


@adapts(MapGate, SWIN_BLOCK)
class MixedSwinBlock(MapHost):
    """Adapter of a block of timm's Swin for gates over the whole map, which replace its shifted windows."""

    leaves_out = ('attn.relative_position_bias_table', 'attn.relative_position_index', 'attn_mask')

    attn: Any

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Return the sizes of the windows' attention."""
        return replace(sizes_of(host.attn), shifted=any(host.shift_size))

    @classmethod
    def make_gate(cls, host: Any, gate_type: type[Gate], **options: Any) -> nn.Module:
        """Return the gate for a host.

        Raises:
            ValueError: Heads of another width than the tokens, or the gate does not fit.
        """
        refuse_other_width(host.attn)
        return super().make_gate(host, gate_type, **options)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project by the windows' layer."""
        query, key, value = self.attn.qkv(x).chunk(3, -1)
        return query, key, value

    def finish(self, x: Tensor) -> Tensor:
        """Project the output, and drop what the host drops."""
        return self.attn.proj_drop(self.attn.proj(x))

    def _attn(self, x: Tensor) -> Tensor:
        """Attend over a map ``(B, H, W, C)``; the block calls this between its norms."""
        return self.attend(x.flatten(1, 2), (x.shape[1], x.shape[2])).view_as(x)
