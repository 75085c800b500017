"""Attention over an H x W map of tokens: what gates mix, and what adapters of hosts project."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from mmgate._environment import log
from mmgate.layers.base.gate import Gate, Sizes
from mmgate.layers.base.gated import GatedModule
from mmgate.layers.base.of_mmcv import build_dropout
from mmgate.ops.layout import check_layout

Size = tuple[int, int]


class MapGate(Gate):
    """Base of what mixes the tokens of a map instead of the host's attention; a subclass has :meth:`mix`.

    Positions of another resolution are resized on loading, so that the result is what a forward pass makes of them.

    Args:
        sizes: Of the host's attention.
        class_token: Whether a class token comes before the map's tokens (DeiT), or how many tokens do: a class token
            and the registers of DINOv2.

    Raises:
        ValueError: The channels are no multiple of the heads.

    Attributes:
        class_tokens: How many tokens come before the map's.
        map_size: Height and width of the map where a call names none, as a ViT's do not.
        scale: Factor of the logits.
        shifted: Whether the host's windows are shifted, as those of Swin's odd blocks.
    """

    map_size: Size | None = None

    def __init__(self, sizes: Sizes, *, class_token: bool | int = False) -> None:
        super().__init__(sizes)
        self.class_tokens = int(class_token)
        self.scale = sizes.scale or self.head_dim**-0.5
        self.shifted = sizes.shifted

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: Size) -> Tensor:
        """Return the mixed tokens ``(B, N, C)`` before the output projection.

        Args:
            x: Input ``(B, N, C)``.
            q: Projected queries ``(B, N, C)``, the class token first if there is one.
            k: Projected keys ``(B, N, C)``.
            v: Projected values ``(B, N, C)``.
            hw_shape: Height and width of the map, ``N = class_tokens + H W``.
        """
        raise TypeError(f'{type(self).__name__} mixes no tokens; use a subclass.')

    def read_map(self, name: str, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: Size) -> Tensor:
        """Return one of :meth:`map_readings`; the further arguments are those of :meth:`mix`."""
        raise TypeError(f'{type(self).__name__} has no reading {name!r}.')

    def map_readings(self) -> tuple[str, ...]:
        """Return what :meth:`read_map` knows: ``'attention'``, ``'agents'``, ``'kv'``, ``'geometry'``, or nothing."""
        return ()

    def hw_shape(self, tokens: int) -> Size:
        """Return the map of so many tokens where a call does not name it: that of pre-training, or else a square."""
        tokens -= self.class_tokens
        if self.map_size is not None and tokens == self.map_size[0] * self.map_size[1]:
            return self.map_size
        side = isqrt(tokens)
        return side, side

    def after_class_token(self, x: Tensor) -> Tensor:
        """Return values of the map's tokens ``(B, h w, C)`` with a zero for the class token before them, if any."""
        return F.pad(x, (0, 0, self.class_tokens, 0)) if self.class_tokens else x

    def resize_loaded(self, state_dict: dict[str, Any], prefix: str) -> list[str]:
        """Resize in a state dict what is of another resolution, and return the names of what was resized."""
        return []

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        resized = self.resize_loaded(state_dict, prefix)
        if resized:
            name = prefix.rstrip('.') or type(self).__name__
            log(f'{name}: {", ".join(resized)} resized to a map of {self.map_size}')
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _refuse_other_map(x: Tensor, hw_shape: Size, class_tokens: int = 0) -> None:
    height, width = hw_shape
    if x.shape[1] != class_tokens + height * width:
        extra = f' and {class_tokens} class token{"s" * (class_tokens > 1)}' if class_tokens else ''
        raise ValueError(f'{x.shape[1]} tokens do not make a map of {height} x {width}{extra}.')


class MapHost(GatedModule):
    """Base of the adapters of attention over a map; a subclass projects as its host does."""

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values ``(B, N, C)`` of ``x (B, N, C)``, by default those of a joint ``qkv``."""
        q, k, v = self.qkv(x).chunk(3, -1)
        return q, k, v

    def finish(self, x: Tensor) -> Tensor:
        """Return the output ``(B, N, C)`` of mixed tokens: projected, with what the host drops."""
        return self.dropout_layer(self.proj_drop(self.proj(x)))

    def attend(self, x: Tensor, hw_shape: Size | None, identity: Tensor | float | None = None) -> Tensor:
        """Attend over ``(B, N, C)`` tokens of a map of ``hw_shape``; ``identity``, if given, is added (PVT, Twins).

        Raises:
            TypeError: ``x`` is no tensor.
            ValueError: ``x`` has another shape, or its tokens do not make the map.
        """
        gate: MapGate = self.gate
        added = identity if isinstance(identity, Tensor) else None  # Twins adds 0.0
        check_layout(('x', x, f'B N {gate.embed_dims}'), ('identity', added, f'B N {gate.embed_dims}'), filled='N')
        height, width = gate.hw_shape(x.shape[1]) if hw_shape is None else tuple(hw_shape)
        _refuse_other_map(x, (height, width), gate.class_tokens)
        q, k, v = self.project(x)
        out = self.finish(gate.mix(x, q, k, v, (height, width)))
        return out if identity is None else identity + out


class MapAttention(nn.Module):
    """Projections of an attention over a map; a subclass mixes the tokens in :meth:`mix`, or is gated.

    Args:
        embed_dims: Channels C, a multiple of ``num_heads``.
        num_heads: Heads H.
        qkv_bias: Whether the projections of query, key and value have a bias.
        qk_scale: Factor of the logits; ``1 / sqrt(d)`` by default.
        attn_drop: Probability of dropping an attention weight.
        proj_drop: Dropout after the output projection.
        dropout_layer: Dropout or drop path before the identity is added.

    Raises:
        ValueError: ``embed_dims`` is no multiple of ``num_heads``.
    """

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        *,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        dropout_layer: dict | None = None,
    ) -> None:
        super().__init__()
        if embed_dims % num_heads:
            raise ValueError(f'embed_dims={embed_dims} is not a multiple of num_heads={num_heads}.')
        self.embed_dims = embed_dims
        self.num_heads = num_heads
        self.attn_drop = attn_drop
        self.head_dim = embed_dims // num_heads
        self.scale = qk_scale or self.head_dim**-0.5
        self.qkv = nn.Linear(embed_dims, 3 * embed_dims, bias=qkv_bias)
        self.proj = nn.Linear(embed_dims, embed_dims)
        self.proj_drop = nn.Dropout(proj_drop)
        self.dropout_layer = build_dropout(dropout_layer) if dropout_layer else nn.Identity()

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: Size) -> Tensor:
        """Return the mixed tokens; the arguments are those of :meth:`MapGate.mix`."""
        raise TypeError(f'{type(self).__name__} mixes no tokens; use a subclass.')

    def forward(self, x: Tensor, hw_shape: Size) -> Tensor:
        """Attend over ``(B, N, C)`` tokens of a map of ``hw_shape``.

        Raises:
            TypeError: ``x`` is no tensor.
            ValueError: ``x`` has another shape, or its tokens do not make the map.
        """
        check_layout(('x', x, f'B N {self.embed_dims}'), filled='N')
        _refuse_other_map(x, hw_shape)
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.dropout_layer(self.proj_drop(self.proj(self.mix(x, q, k, v, hw_shape))))


OF_OTHER_HOSTS: Mapping[str, str] = {
    'attn.in_proj_weight': 'qkv.weight',
    'attn.in_proj_bias': 'qkv.bias',
    'attn.out_proj.': 'proj.',
    'w_msa.qkv.': 'qkv.',
    'w_msa.proj.': 'proj.',
}


class GatedMapAttention(MapHost, MapAttention):
    """Attention over a map by itself, with a gate; a subclass names the gate.

    It loads what the attention of PVT, Swin and our CSwin saves: projections are renamed, and windows' positions,
    reduced maps and convolutions in stripes are dropped.

    Args:
        embed_dims: Channels C, a multiple of ``num_heads``.
        num_heads: Heads H.
        qkv_bias: As in :class:`MapAttention`, and so the next four.
        qk_scale: See there.
        attn_drop: See there.
        proj_drop: See there.
        dropout_layer: See there.
        **options: Of the gate.

    Attributes:
        gate_type: The gate's class.
    """

    gate_type: type[MapGate]
    old_names = OF_OTHER_HOSTS
    leaves_out: ClassVar[tuple[str, ...]] = (
        'w_msa.relative_position_bias_table',
        'w_msa.relative_position_index',
        'sr',
        'norm',
        'lepe',
    )

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        *,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        dropout_layer: dict | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            embed_dims,
            num_heads,
            qkv_bias=qkv_bias,
            qk_scale=qk_scale,
            attn_drop=attn_drop,
            proj_drop=proj_drop,
            dropout_layer=dropout_layer,
        )
        sizes = Sizes(embed_dims, num_heads, dropout=attn_drop, scale=self.scale, bias=qkv_bias)
        self.gate = self.gate_type(sizes, **options)
        self.gate.reset_gate()

    def init_weights(self) -> None:
        """Draw the gate as it starts, see :meth:`.Gate.init_weights`; a detector calls this after a xavier pass."""
        self.gate.init_weights()

    def forward(self, x: Tensor, hw_shape: Size | None = None, identity: Tensor | float | None = None) -> Tensor:
        """Attend, see :meth:`attend`; without ``hw_shape`` (ViT) the map is that of pre-training, or else a square."""
        return self.attend(x, hw_shape, identity)
