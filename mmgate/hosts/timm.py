"""Adapters that let gates into timm's attention: of ViT, DINOv2, DINOv3, EVA, Swin, Visformer, GCViT and PVTv2.

mmpretrain, mmdet and mmseg have them through their ``TIMMBackbone``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import apply_rot_embed_cat
from timm.models.gcvit import WindowAttentionGlobal
from timm.models.pvt_v2 import Attention as PVTAttention
from timm.models.visformer import Attention as VisformerAttention
from torch import Tensor, nn

from mmgate.adapter import Adapter, is_off
from mmgate.errors import ConfigError
from mmgate.gate import GATE_NAME, Sizes, StateDict
from mmgate.gates.base.dense import DenseAdapter, DenseGate
from mmgate.gates.base.map import MapAdapter, MapGate
from mmgate.gating import freeze_unused
from mmgate.hosts.from_model import nearest_with, stride_of
from mmgate.hosts.table import adapts
from mmgate.hosts.window import WindowMSAAdapter

# By name, as timm has moved its classes between files.
TOKENS = 'timm.layers.attention.Attention'
ROTARY = ('timm.layers.attention.AttentionRope', 'timm.models.eva.EvaAttention')
WINDOWS = 'timm.models.swin_transformer.WindowAttention'
SWIN_BLOCK = 'timm.models.swin_transformer.SwinTransformerBlock'
# timm's own gate has the weight of an SDPA gate at G1 in this place, so that its checkpoints load.
OF_TIMM_GATES = {'gate.weight': 'gate.gate_weight', 'gate.bias': 'gate.gate_bias'}


class TimmAdapter(DenseAdapter):
    """Base of the adapters that let gates into timm's attention modules."""

    num_heads: int
    qkv: nn.Module
    proj: nn.Module
    proj_drop: nn.Module

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Read channels, heads and dropout off an attention module of timm (the host), for its gate."""
        channels = host.head_dim * host.num_heads
        width = getattr(host, 'dim', channels)
        inputs = (width, width, width)
        return Sizes(channels, host.num_heads, inputs=inputs, output=width, dropout=host.attn_drop.p)


@adapts(DenseGate, VisformerAttention)
class VisformerAttentionAdapter(TimmAdapter):
    """Adapter that lets dense gates into Visformer's attention, whose projections are convolutions."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend over a map ``(B, C, h, w)``, with the gate."""
        size = x.shape[2:]
        query, key, value = self.qkv(x).flatten(2).unflatten(1, (3, self.num_heads, -1)).permute(1, 0, 2, 4, 3)
        tokens = x.flatten(2).transpose(1, 2)  # (B, N, C)

        def project(heads: Tensor) -> Tensor:
            return self.proj(heads.transpose(1, 2).unflatten(-1, size)).flatten(2).transpose(1, 2)

        out = self.attend_gated((query, key, value), (tokens, tokens, tokens), project)
        return self.proj_drop(out.transpose(1, 2).unflatten(-1, size))


def shares_by_image(forward: Callable[..., Any]) -> bool:
    """Return True if the source of GCViT's attention gives each image's global queries to that image's windows.

    timm up to 1.0.29 repeats the batch instead, which mixes images where there are several.
    """
    return 'repeat_interleave' in forward.__code__.co_names


BY_IMAGE = shares_by_image(WindowAttentionGlobal.forward)


@adapts(DenseGate, WindowAttentionGlobal)
class WindowAttentionGlobalAdapter(TimmAdapter):
    """Adapter that lets dense gates into GCViT's attention in windows.

    The position bias is added after the gate.

    Global queries are the image's, shared by its windows and not projected. They are then the gate's query input, too.
    """

    def forward(self, x: Tensor, q_global: Tensor | None = None) -> Tensor:
        """Attend inside each of nW windows of an image, with the gate; ``x`` is ``(B nW, N, C)``, image by image.

        Global queries ``q_global`` ``(B, ..., C)``, if given, replace those of the windows.
        """
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
class PVTAttentionAdapter(TimmAdapter):
    """Adapter that lets dense gates into PVTv2's attention; keys and values stay those of the reduced map."""

    def forward(self, x: Tensor, feat_size: list[int]) -> Tensor:
        """Attend from the tokens ``(B, N, C)`` of a map to those of the reduced map, with the gate."""
        reduced = x
        if self.sr is not None:
            grid = x.transpose(1, 2).unflatten(-1, tuple(feat_size))
            grid = self.sr(grid if self.pool is None else self.pool(grid))
            reduced = self.norm(grid.flatten(2).transpose(1, 2))
            reduced = reduced if self.act is None else self.act(reduced)
        query = self.gate.split_heads(self.q(x))
        key, value = self.kv(reduced).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj_drop(self.attend_gated((query, key, value), (x, reduced, reduced), self.proj))


class SizedByProjections(Adapter):
    """Base of the adapters for timm's ViTs and Swin, whose heads may have another total width than the tokens."""

    @property
    def gate(self) -> Any:
        """The gate; None while it is off, as timm's own attribute of this name is, which its forward looks at."""
        return None if is_off(self) else self._modules[GATE_NAME]

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Read channels, heads and dropout off an attention module of timm (the host), for its gate."""
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


def refuse_own_gate(host: Any) -> None:
    """Raise ConfigError for an attention that was built with timm's own gate, ``gated=True``."""
    if getattr(host, GATE_NAME, None) is not None:
        raise ConfigError(
            f"this {type(host).__name__} has an attribute 'gate' already. It is one of timm's: build the attention "
            'without gated=True, and gate it by SDPAGatedMultiheadAttention, which loads checkpoints of that gate '
            '(without scale_norm).'
        )


class TokenProjections(SizedByProjections, DenseAdapter):
    """Base of the adapters for timm's ViTs; it has their projections, norms of queries and keys, and masks.

    A gate at G1 acts before the norm of the heads (``scale_norm``), where there is one; timm's own acts after it.
    """

    num_heads: int
    qkv: nn.Linear | None
    q_norm: nn.Module
    k_norm: nn.Module
    proj: nn.Linear
    proj_drop: nn.Module

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Read the sizes off an attention module of timm (the host), for its gate."""
        normed = not isinstance(host.q_norm, nn.Identity)
        reason = f'this {type(host).__name__} normalises queries and keys (qk_norm)'
        return replace(super().sizes(host), why_whole_heads=reason if normed else '')

    @classmethod
    def check(cls, host: Any) -> None:
        """Raise ConfigError for a host that was built with timm's own gate."""
        refuse_own_gate(host)

    def _load_from_state_dict(self, state_dict: StateDict, prefix: str, *args: object, **kwargs: object) -> None:
        norm = getattr(self, 'norm', None)
        # timm's gate acts after a norm of the heads (scale_norm), ours before it: such a checkpoint does not fit.
        if norm is None or isinstance(norm, nn.Identity):
            for theirs, ours in OF_TIMM_GATES.items():
                if f'{prefix}{theirs}' in state_dict:
                    state_dict[f'{prefix}{ours}'] = state_dict.pop(f'{prefix}{theirs}')
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens to queries, keys (normalised where timm does so) and values, ``(B, H|h, N, d)`` each.

        Keys and values may have fewer heads, ``h``, which several heads of queries share.
        """
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
        """Attend between projected heads of the tokens ``(B, N, C)``, with the gate, and project the output.

        A mask is timm's, True where a query may attend.
        """
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
class AttentionAdapter(TokenProjections):
    """Adapter that lets dense gates into the attention of timm's ViT, DeiT, DINOv2, SigLIP, CLIP and others."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attend over the tokens ``(B, N, C)``, with the gate.

        A mask broadcasts to ``(B, H, N, N)``; it is bool, True where a query may attend, or added to the logits.
        """
        return self.attended(x, self.heads(x), attn_mask, is_causal)


@adapts(DenseGate, *ROTARY)
class RotaryAttentionAdapter(TokenProjections):
    """Adapter that lets dense gates into timm's attention with rotary positions: EVA, DINOv3, Perception Encoder."""

    num_prefix_tokens: int

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Read the sizes off an attention module of timm (the host), for its gate."""
        reason = f'{type(host).__name__} rotates channels of both together'
        return replace(super().sizes(host), why_whole_heads=reason)

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Attend over the tokens ``(B, N, C)``, with the gate and, on the map's tokens, rotary positions ``rope``.

        Masks are as in the ViT's.
        """
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
        """Apply rotary positions ``rope`` to heads ``(B, H, N, d)``, except for class and register tokens."""
        before = heads[:, :, : self.num_prefix_tokens]
        of_map = heads[:, :, self.num_prefix_tokens :]
        halves = dict(half=True) if getattr(self, 'rotate_half', False) else {}
        return torch.cat((before, apply_rot_embed_cat(of_map, rope, **halves)), 2)


@adapts(DenseGate, WINDOWS)
class WindowAttentionAdapter(SizedByProjections, WindowMSAAdapter):
    """Adapter that lets dense gates into the windows' attention of timm's Swin."""


def check_width(host: Any) -> None:
    """Raise ConfigError if the heads of an attention together have another width than its input."""
    widths = (host.qkv.in_features, host.proj.in_features, host.proj.out_features)
    if len(set(widths)) > 1:
        raise ConfigError(
            f'an attention over a map needs one width, but {type(host).__name__} has {widths[0]} channels, its heads '
            f'{widths[1]} and its output {widths[2]}.'
        )


@adapts(MapGate, TOKENS)
class MixedAttention(SizedByProjections, MapAdapter):  # type: ignore[override]
    """Adapter that lets attention over a map (Agent, SAGA, linear) replace the attention of timm's ViT.

    Class and register tokens come before the map's. A call of it does not name the map, which is the one that the ViT
    was built for.
    """

    num_heads: int
    q_norm: nn.Module
    k_norm: nn.Module
    proj: nn.Module
    proj_drop: nn.Module

    @classmethod
    def check(cls, host: Any) -> None:
        """Raise ConfigError for heads of another width than the tokens, or for timm's own gate."""
        refuse_own_gate(host)
        check_width(host)

    @classmethod
    def sizes_from_model(cls, model: nn.Module, path: str) -> dict[str, Any]:
        """Return the map of the ViT around, the number of tokens before it, and the stride.

        Raises:
            ConfigError: The model around keeps no map, or hands in tokens of other maps.
        """
        vit = nearest_with(model, path, 'num_prefix_tokens')
        embedding: Any = getattr(vit, 'patch_embed', None)
        if getattr(embedding, 'grid_size', None) is None:
            raise ConfigError(
                'a call of this attention does not name the map, and no ViT around it keeps one '
                '(patch_embed.grid_size). Gate the whole ViT.'
            )
        name = type(vit).__name__
        if getattr(vit, 'dynamic_img_size', False):
            raise ConfigError(
                f'a call of this attention does not name the map, and this {name} takes images of any size. Build it '
                'for one, img_size=..., without dynamic_img_size=True.'
            )
        drops = getattr(vit, 'patch_drop', None)
        if drops is not None and not isinstance(drops, nn.Identity):
            raise ConfigError(
                f'it needs all tokens of a map, and this {name} drops some in training (patch_drop: '
                f'{type(drops).__name__}). Build it with patch_drop_rate=0.'
            )
        height, width = embedding.grid_size
        told = stride_of(embedding.img_size, (height, width))
        return dict(host_map=(height, width), class_tokens=vit.num_prefix_tokens, **told)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens to queries, keys and values ``(B, N, C)``, queries and keys normalised where timm does so."""
        query, key, value = self.qkv(x).chunk(3, -1)
        shape = (self.num_heads, -1)
        query = self.q_norm(query.unflatten(-1, shape)).flatten(-2)
        key = self.k_norm(key.unflatten(-1, shape)).flatten(-2)
        return query, key, value

    def finish(self, x: Tensor) -> Tensor:
        """Project the mixed tokens to the output, and apply the host's dropout."""
        return self.proj_drop(self.proj(self.norm(x) if hasattr(self, 'norm') else x))

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attend over the tokens ``(B, N, C)`` of a map, with the gate.

        Raises:
            ValueError: A mask: there are no pairs of tokens to mask.
        """
        if attn_mask is not None or is_causal:
            raise ValueError(
                f'{type(self.gate).__name__} forms no pairs of tokens, so that a mask has nothing to mask.'
            )
        return self.attend_gated(x)


@adapts(MapGate, SWIN_BLOCK)
class MixedSwinBlock(MapAdapter):
    """Adapter that lets attention over the whole map replace the shifted windows in a block of timm's Swin."""

    unused = ('attn.relative_position_bias_table', 'attn.relative_position_index', 'attn_mask')

    attn: Any
    shift_size: tuple[int, int]

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Read channels and heads off the windows' attention in the block, for the gate."""
        return replace(SizedByProjections.sizes(host.attn), shifted=any(host.shift_size))

    @classmethod
    def sizes_from_model(cls, model: nn.Module, path: str) -> dict[str, Any]:
        """Return the map that the block keeps, and the stride."""
        block: Any = model.get_submodule(path)
        height, width = block.input_resolution
        swin = nearest_with(model, path, 'patch_embed')
        told = {} if swin is None else stride_of(swin.patch_embed.img_size, (height, width))
        return dict(host_map=(height, width), **told)

    @classmethod
    def check(cls, host: Any) -> None:
        """Raise ConfigError for heads of another width than the tokens."""
        check_width(host.attn)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens to queries, keys and values with the layer ``qkv`` of the windows' attention."""
        query, key, value = self.attn.qkv(x).chunk(3, -1)
        return query, key, value

    def finish(self, x: Tensor) -> Tensor:
        """Project the mixed tokens to the output, and apply the host's dropout."""
        return self.attn.proj_drop(self.attn.proj(x))

    def set_input_size(self, *args: Any, **kwargs: Any) -> None:
        """Resize the block as timm does, with the parts of the windows' attention that a gated block does not use."""
        super().set_input_size(*args, **kwargs)  # type: ignore[misc]
        freeze_unused(self)
        self.gate.shifted = any(self.shift_size)

    def _attn(self, x: Tensor) -> Tensor:
        """Attend over the whole map ``(B, H, W, C)``, with the gate; the block calls this method for its attention."""
        return self.attend_gated(x.flatten(1, 2), (x.shape[1], x.shape[2])).view_as(x)
