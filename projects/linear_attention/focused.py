"""Focused linear attention, from the FLatten transformer: features are sharpened by a power."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate import ConfigError, LinearGate, Sizes, map_attention
from mmgate.ops import kernel_attention

from .ops import wide


class FocusedLinearGate(LinearGate):
    """Focused linear attention: sharpened features, plus a depthwise convolution: ``phi(Q) (phi(K)^T V) + DWC(V)``.

    The product is normalised by the sums of its weights.

    ``phi(x) = ‖y‖ y^p / ‖y^p‖`` with ``y = ReLU(x) / softplus(s)``. The norms are over all C channels, and ``s`` is
    learnt for each channel. A learnt position encoding is added to K.

    Args:
        sizes: Sizes of the host's attention.
        power: Focusing factor p, above 0.
        **kwargs: Arguments of :class:`mmgate.LinearGate`.

    Raises:
        ConfigError: The power is not above 0.

    Source: FLatten transformer: vision transformer using focused linear attention (Han et al., 2023), Eq. 5 to 8.
    """

    default_dwc = 5
    has_positions = True
    shares_dwc = True
    undecayed = (*LinearGate.undecayed, 'focus_scale')

    def __init__(self, sizes: Sizes, *, power: float = 3.0, **kwargs: Any) -> None:
        super().__init__(sizes, **kwargs)
        if not power > 0:
            raise ConfigError(f'power={power!r} must be a number above 0.')
        self.power = power
        self.focus_scale = nn.Parameter(torch.zeros(1, 1, self.embed_dims))

    def reset(self) -> None:
        """Initialise the convolution, the position encoding and the scale of queries and keys."""
        super().reset()
        nn.init.zeros_(self.focus_scale)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Sharpen queries and keys, attend in each head, and return the tokens ``(B, N, C)``."""
        q, k, v = (self.split_heads(t) for t in (self._focused(q), self._focused(k), v))
        self.note_map(k, v)
        return self.merge_heads(kernel_attention(q, k, v))

    def _focused(self, x: Tensor) -> Tensor:
        """Return the features phi of ``x`` ``(B, N, C)``; in float32 if it has 16 bits, whose range powers leave."""
        x = wide((x.relu() + 1e-6) / F.softplus(self.focus_scale))
        raised = x**self.power
        return raised * (x.norm(dim=-1, keepdim=True) / raised.norm(dim=-1, keepdim=True).clamp(min=1e-12))


FocusedLinearAttention = map_attention('FocusedLinearAttention', FocusedLinearGate, force=True)
