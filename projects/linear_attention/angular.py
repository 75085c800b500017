"""Linear angular attention, from Castling-ViT."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from mmgate import ConfigError, LinearGate, Sizes, map_attention
from mmgate.ops import key_value_map

from .ops import unit, wide


class LinearAngularGate(LinearGate):
    """Linear angular attention plus a depthwise convolution: ``norm(V / 2 + Q̂ (K̂^T V) / pi) + DWC(V)``.

    Queries, keys and the sum are normalised in each head.

    Args:
        sizes: Sizes of the host's attention.
        convolution: ``'tokens'`` (default) convolves along the sequence of all tokens, class token included, with one
            kernel per head and without a bias, as in the authors' public code. ``'map'`` convolves over the map with C
            kernels and biases, as the other linear attentions do.
        dwc: Length of the kernel along the tokens, 9 by default, or side of the kernel over the map, 3 by default; 0
            for no convolution.
        **kwargs: Arguments of :class:`mmgate.LinearGate`.

    Raises:
        ConfigError: The convolution is unknown.

    Source: Castling-ViT (You et al., 2023), the linear term of the angular kernel, and its public code.
    """

    def __init__(self, sizes: Sizes, *, convolution: str = 'tokens', dwc: int | None = None, **kwargs: Any) -> None:
        if convolution not in ('tokens', 'map'):
            raise ConfigError(f'convolution={convolution!r} is unknown; choose one of tokens, map.')
        self.along_tokens = convolution == 'tokens'
        default = 9 if self.along_tokens else 3
        length = default if dwc is None else dwc
        super().__init__(sizes, dwc=length, **kwargs)
        if self.along_tokens and length:
            heads = sizes.heads
            self.dwc = nn.Conv2d(heads, heads, (length, 1), padding=(length // 2, 0), groups=heads, bias=False)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Attend in each head by linear angular attention, and return the tokens ``(B, N, C)``."""
        q, k, v = (self.split_heads(t) for t in (q, k, v))
        k = unit(k)
        self.note_map(k, v)
        tokens = wide(unit(q) @ key_value_map(k, v)) * (k.shape[-2] / math.pi)
        return self.merge_heads(unit(wide(v) / 2 + tokens, v.dtype))

    def convolve(self, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Convolve the values ``(B, N, C)`` along the tokens, or over the map with ``convolution='map'``."""
        if self.along_tokens:
            return self.merge_heads(self.dwc(self.split_heads(v)))
        return super().convolve(v, hw_shape)


LinearAngularAttention = map_attention('LinearAngularAttention', LinearAngularGate, force=True)
