"""What attentions over an H x W map of tokens share: the call signature of PVT's and Swin's attention."""

from __future__ import annotations

from math import isqrt
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mmgate._environment import log
from mmgate.layers.base.of_mmcv import build_dropout
from mmgate.ops.layout import check_layout


class MapAttention(nn.Module):
    """Self-attention over the tokens of an H x W map; a subclass mixes them in :meth:`mix`.

    Drop-in for mmdet's ``SpatialReductionAttention``, of which it leaves out the reduction, and for the
    ``ShiftWindowMSA`` of mmdet, mmseg and mmpretrain, whose checkpoints it loads: projections are renamed, what belongs
    to windows or to a reduced map is dropped. Positions of another resolution are resized on loading, so that the
    result is what a forward pass makes of them.

    Args:
        embed_dims: Channels C, a multiple of ``num_heads``.
        num_heads: Heads H.
        qkv_bias: Whether the projections of query, key and value have a bias.
        qk_scale: Factor of the logits; ``1 / sqrt(d)`` by default.
        attn_drop: Probability of dropping an attention weight.
        proj_drop: Dropout after the output projection.
        dropout_layer: Dropout or drop path before the identity is added.
        class_token: Whether a class token stands before the map's tokens (DeiT).

    Raises:
        ValueError: ``embed_dims`` is no multiple of ``num_heads``.

    Attributes:
        class_tokens: How many tokens stand before the map's.
        map_size: Height and width of the map where a call names none, as a ViT's do not.
        shifted: Whether the host's windows are shifted, as those of Swin's odd blocks; its adapter says so.
        without: Attributes of hosts that mean nothing here: there are no windows, and the map is not reduced.
    """

    without = ('window_size', 'shift_size', 'sr_ratio', 'pad_small_map')
    shifted = False
    map_size: tuple[int, int] | None = None

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
        class_token: bool = False,
    ) -> None:
        super().__init__()
        if embed_dims % num_heads:
            raise ValueError(f'embed_dims={embed_dims} is not a multiple of num_heads={num_heads}.')
        self.embed_dims, self.num_heads, self.attn_drop = embed_dims, num_heads, attn_drop
        self.class_tokens = int(class_token)
        self.head_dim = embed_dims // num_heads
        self.scale = qk_scale or self.head_dim**-0.5
        self.qkv = nn.Linear(embed_dims, 3 * embed_dims, bias=qkv_bias)
        self.proj = nn.Linear(embed_dims, embed_dims)
        self.proj_drop = nn.Dropout(proj_drop)
        self.dropout_layer = build_dropout(dropout_layer) if dropout_layer else nn.Identity()

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Return the mixed tokens before the output projection.

        Args:
            x: Input ``(B, N, C)``.
            q: Projected queries ``(B, N, C)``, the class token first if there is one.
            k: Projected keys ``(B, N, C)``.
            v: Projected values ``(B, N, C)``.
            hw_shape: Height and width of the map, ``N = class_tokens + H W``.
        """
        raise TypeError(f'{type(self).__name__} mixes no tokens; use a subclass.')

    def forward(
        self, x: Tensor, hw_shape: tuple[int, int] | None = None, identity: Tensor | float | None = None
    ) -> Tensor:
        """Attend over ``(B, N, C)`` tokens of a map of ``hw_shape``; ``identity``, if given, is added (PVT, Twins).

        Without ``hw_shape`` (ViT) the map is that of pre-training, or else a square.

        Raises:
            TypeError: ``x`` is no tensor.
            ValueError: ``x`` has another shape, or its tokens do not make the map.
        """
        added = identity if isinstance(identity, Tensor) else None  # Twins adds 0.0
        check_layout(('x', x, f'B N {self.embed_dims}'), ('identity', added, f'B N {self.embed_dims}'), filled='N')
        height, width = self._square(x.shape[1]) if hw_shape is None else tuple(hw_shape)
        if x.shape[1] != self.class_tokens + height * width:
            extra = f' and {self.class_tokens} class token' if self.class_tokens else ''
            raise ValueError(f'{x.shape[1]} tokens do not make a map of {height} x {width}{extra}.')
        q, k, v = self.qkv(x).chunk(3, -1)
        out = self.dropout_layer(self.proj_drop(self.proj(self.mix(x, q, k, v, (height, width)))))
        return out if identity is None else identity + out

    def _square(self, tokens: int) -> tuple[int, int]:
        tokens -= self.class_tokens
        if self.map_size is not None and tokens == self.map_size[0] * self.map_size[1]:
            return self.map_size
        side = isqrt(tokens)
        return side, side

    def behind_class_token(self, x: Tensor) -> Tensor:
        """Return values of the map's tokens ``(B, h w, C)`` with a zero for the class token before them, if any."""
        return F.pad(x, (0, 0, self.class_tokens, 0)) if self.class_tokens else x

    def split_heads(self, x: Tensor) -> Tensor:
        """Return ``(B, N, H * d)`` as ``(B, H, N, d)``."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def adopt(self, state_dict: dict[str, Any], prefix: str) -> list[str]:
        """Rename what a host's state dict holds, and resize what is of another resolution; return what was resized."""
        for old, new in _RENAMED.items():
            value = state_dict.pop(prefix + old, None)
            if value is not None:
                state_dict[prefix + new] = value
        for key in [key for key in state_dict if key.startswith(tuple(f'{prefix}{name}' for name in _OF_HOSTS))]:
            if not hasattr(self, key[len(prefix) :].partition('.')[0]):
                del state_dict[key]
        return []

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        resized = self.adopt(state_dict, prefix)
        if resized:
            name = prefix.rstrip('.') or type(self).__name__
            log(f'{name}: {", ".join(resized)} resized to a map of {self.map_size}')
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    @property
    def _drop(self) -> float:
        return self.attn_drop if self.training else 0.0


_OURS = ('qkv.weight', 'qkv.bias', 'proj.weight', 'proj.bias')
_OF_TORCH = ('attn.in_proj_weight', 'attn.in_proj_bias', 'attn.out_proj.weight', 'attn.out_proj.bias')
_RENAMED = {**dict(zip(_OF_TORCH, _OURS, strict=True)), **{f'w_msa.{name}': name for name in _OURS}}
# what attention over the whole map has no use for: windows' positions, a reduced map, convolutions in stripes
_OF_HOSTS = ('w_msa.relative_position_', 'sr.', 'norm.', 'lepe.')
