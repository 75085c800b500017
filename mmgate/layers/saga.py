"""SAGA: selective adaptive gating for linear attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.ops.gated_linear_attention import gated_linear_attention
from mmgate.registry import MODELS

from .map_attention import MapAttention
from .start import OwnStart

KERNEL = 5


@MODELS.register_module()
class SAGAAttention(OwnStart, MapAttention):
    """Gated linear attention over an H x W map: ``[Q ((K * A)^T (V * B)) + DWC(V)] * G``.

    ``A = sigmoid(x Wa)`` and ``B = sigmoid(x Wb)`` gate keys and values, ``G = x Wg`` the output. K^T V is scaled by
    1 / N, as 1 / sqrt(N) on each factor, and Q by 1 / sqrt(d), so that the output does not grow with the image; the
    paper leaves that open. What else it leaves open follows from its parameter counts: a learnt position encoding is
    added to K, resized bilinearly where the map is not the one of pre-training, and the 5 x 5 depthwise convolution has
    d channels, shared by the heads.

    Args:
        embed_dims: Channels C, a multiple of ``num_heads``.
        num_heads: Heads H.
        map_size: Height and width of the map in pre-training.
        gate: Gate keys and values (Table 4, Gate_Aug).
        dwc: Add the convolved values (Table 4, DWC).
        output_augmentation: Multiply by G (Table 4, Output_Aug).
        position_encoding: Add the learnt position encoding to K.
        class_token: Whether a class token stands before the map's tokens (DeiT); it is not convolved.
        **kwargs: ``qkv_bias``, ``qk_scale``, ``proj_drop`` and ``dropout_layer`` of
            :class:`~mmgate.layers.map_attention.MapAttention`. There are no attention weights to drop.

    Raises:
        ValueError: ``embed_dims`` is no multiple of ``num_heads``, or ``attn_drop`` is not 0.

    The convolution keeps torch's start and the position encoding starts at 0, whatever a host's ``init_weights`` does.

    Source: SAGA, Eq. 9 and 10, Table 4.
    """

    own = ('dwc', 'position_encoding')

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        *,
        map_size: tuple[int, int],
        gate: bool = True,
        dwc: bool = True,
        output_augmentation: bool = True,
        position_encoding: bool = True,
        class_token: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(embed_dims, num_heads, **kwargs)
        if self.attn_drop:
            raise ValueError(
                f'attn_drop={self.attn_drop}: SAGA has no attention weights to drop; leave it at 0, in a backbone '
                "attn_drop_rate, and use proj_drop, a backbone's drop_rate."
            )
        self.map_size: tuple[int, int] = (int(map_size[0]), int(map_size[1]))
        self.class_tokens = int(class_token)
        bias = self.qkv.bias is not None
        self.gate_k = nn.Linear(embed_dims, embed_dims, bias=bias) if gate else None
        self.gate_v = nn.Linear(embed_dims, embed_dims, bias=bias) if gate else None
        self.gate_out = nn.Linear(embed_dims, embed_dims, bias=bias) if output_augmentation else None
        self.dwc = (
            nn.Conv2d(self.head_dim, self.head_dim, KERNEL, padding=KERNEL // 2, groups=self.head_dim) if dwc else None
        )
        tokens = self.map_size[0] * self.map_size[1]
        self.position_encoding = nn.Parameter(torch.zeros(1, tokens, embed_dims)) if position_encoding else None

    def reset_start(self) -> None:
        """Start the convolution and the position encoding anew."""
        if self.dwc is not None:
            self.dwc.reset_parameters()
        if self.position_encoding is not None:
            nn.init.zeros_(self.position_encoding)

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Attend linearly, add the convolved values and gate the sum."""
        if self.position_encoding is not None:
            k = k + self._behind_class_token(self._resized_encoding(hw_shape))
        gate_k = None if self.gate_k is None else self.split_heads(self.gate_k(x).sigmoid())
        gate_v = None if self.gate_v is None else self.split_heads(self.gate_v(x).sigmoid())
        q, k, values = (self.split_heads(t) for t in (q, k, v))
        heads = gated_linear_attention(q, k, values, gate_k, gate_v, scale=self.scale)
        out = heads.transpose(1, 2).flatten(2)  # (B, N, C)
        if self.dwc is not None:
            out = out + self._behind_class_token(self._convolve(v[:, self.class_tokens :], hw_shape))
        return out if self.gate_out is None else out * self.gate_out(x)

    def _behind_class_token(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, self.class_tokens, 0)) if self.class_tokens else x

    def _convolve(self, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Convolve the values ``(B, N, C)``, every head with the same kernels."""
        assert self.dwc is not None
        weight, bias = self.dwc.weight.repeat(self.num_heads, 1, 1, 1), self.dwc.bias
        bias = None if bias is None else bias.repeat(self.num_heads)
        values = v.transpose(1, 2).unflatten(-1, hw_shape)  # (B, C, h, w), channels last in memory
        return F.conv2d(values, weight, bias, padding=KERNEL // 2, groups=self.embed_dims).flatten(2).transpose(1, 2)

    def _resized_encoding(self, hw_shape: tuple[int, int]) -> Tensor:
        assert self.position_encoding is not None
        if hw_shape == self.map_size:
            return self.position_encoding
        grid = self.position_encoding.transpose(1, 2).unflatten(-1, self.map_size)
        return F.interpolate(grid, size=hw_shape, mode='bilinear').flatten(2).transpose(1, 2)

    def extra_repr(self) -> str:
        """Sizes for ``print(module)``."""
        return f'map={self.map_size}'
