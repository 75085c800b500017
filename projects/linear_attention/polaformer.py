"""PolaFormer's linear attention, which treats positive and negative parts of queries and keys separately."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate import ConfigError, LinearGate, Sizes, map_attention, note
from mmgate.ops import kernel_attention, key_value_map

from .ops import wide


class PolaFormerGate(LinearGate):
    """PolaFormer's linear attention over positive and negative parts, gated: ``([same V1; opposite V2] + DWC(V)) * G``.

    The gate is ``G = x Wg``.

    Queries and keys are divided by ``softplus(s)`` and split into their positive and their negative part. Both are
    raised to a learnt power ``1 + alpha sigmoid(p)`` of each head and channel. Products of parts of the same sign weigh
    the first half V1 of the values' channels, those of opposite sign the second half V2. A learnt position encoding is
    added to K.

    Args:
        sizes: Sizes of the host's attention.
        alpha: Most by which the power exceeds 1, 0 or more.
        **kwargs: Arguments of :class:`mmgate.LinearGate`.

    Raises:
        ConfigError: ``alpha`` is negative, or the head width odd.

    Source: PolaFormer: polarity-aware linear attention for vision transformers (Meng et al., 2025).
    """

    gate_layers = ('gate_out',)
    default_dwc = 5
    has_positions = True
    shares_dwc = True
    undecayed = (*LinearGate.undecayed, 'focus_scale', 'power')

    def __init__(self, sizes: Sizes, *, alpha: float = 4.0, **kwargs: Any) -> None:
        super().__init__(sizes, **kwargs)
        if not alpha >= 0:
            raise ConfigError(f'alpha={alpha!r} must be a number of at least 0.')
        if self.head_dim % 2:
            raise ConfigError(
                f'The head width {self.head_dim} must be a multiple of 2: half the channels are for each polarity.'
            )
        self.alpha = alpha
        self.focus_scale = nn.Parameter(torch.zeros(1, 1, self.embed_dims))
        self.power = nn.Parameter(torch.zeros(1, self.num_heads, 1, self.head_dim))

    def reset(self) -> None:
        """Initialise the convolution, the position encoding, the scale, the power and the output gate."""
        super().reset()
        nn.init.zeros_(self.focus_scale)
        nn.init.zeros_(self.power)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Attend in each head to parts of the same and of opposite sign, and return the tokens ``(B, N, C)``."""
        scale = F.softplus(self.focus_scale)
        q, k, v = (self.split_heads(t) for t in (q / scale, k / scale, v))
        power = 1 + self.alpha * self.power.sigmoid()
        q_plus, q_minus = polarities(q, power)
        k_plus, k_minus = polarities(k, power)
        keys = torch.cat([k_plus, k_minus], -1)
        same, opposite = v.chunk(2, -1)

        def polar_map() -> Tensor:  # (B, H, 2 d, d), for queries of both signs
            swapped = torch.cat([k_minus, k_plus], -1)
            halves = (key_value_map(one, half.to(one.dtype)) for one, half in ((keys, same), (swapped, opposite)))
            return torch.cat([*halves], -1)

        note(self, 'kv', polar_map)
        first = kernel_attention(torch.cat([q_plus, q_minus], -1), keys, same)
        second = kernel_attention(torch.cat([q_minus, q_plus], -1), keys, opposite)
        return self.merge_heads(torch.cat([first, second], -1))


def polarities(x: Tensor, power: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positive and the negative part of ``x``, both as numbers from 0 up, raised to a power.

    They are in float32 if ``x`` has 16 bits, whose range powers leave.
    """
    # Without the clamp, the gradient of 0^p with respect to p, which is 0 log 0, would be NaN.
    positive, negative = (part.clamp(min=1e-6) ** power * (part > 0) for part in (wide(x), -wide(x)))
    return positive, negative


PolaFormerAttention = map_attention('PolaFormerAttention', PolaFormerGate, force=True)
